"""Checks a request before its body is read, so that a refusal for lack of room costs next to nothing.

The connection's parser reads the rest of the body behind the answer. It is thus not taken for the next request, and a
client that writes its whole body before it reads finds the answer.
"""

from __future__ import annotations

from collections.abc import Mapping

from starlette.datastructures import Headers

from common.errors import RequestError
from router.access import HEADER, Visit, caller_of
from router.generation import FrontDoor
from router.request import COMPLETION_PATH, GENERATING, POOLING

MANY_PROMPTS = POOLING | {COMPLETION_PATH}
MAX_OTHER_BYTES, MAX_TOKEN_BYTES = 64 * 1024, 128
"""The most bytes of a conversation's body beside its messages, and the most bytes of messages for each token."""


def generates(scope: Mapping[str, object]) -> bool:
    """Whether the request is one for generation."""
    return scope["method"] == "POST" and scope["path"] in GENERATING


def check_entrance(door: FrontDoor, visit: Visit, headers: Headers) -> None:
    """Raises RequestError for a generation request that cannot be served now with any body, and counts the refusal."""
    try:
        door.check_open()
        door.gate.check_tokens(visit)
        # 0 for those whose body may hold many short prompts
        num_bytes = 0 if visit.path in MANY_PROMPTS else declared_bytes(headers)
        caller = caller_of(door.config.classes, visit.key, headers.get(HEADER, ""))
        door.check_capacity(lambda num_tokens: num_bytes > MAX_OTHER_BYTES + MAX_TOKEN_BYTES * num_tokens, caller)
    except RequestError as error:
        door.add_retry_after(error)
        log, _ = door.begin(visit, headers)
        log.fail(error)
        log.end()
        raise


def declared_bytes(headers: Headers) -> int:
    """The `Content-Length`; 0 without a valid one."""
    declared = headers.get("content-length", "0")
    return int(declared) if declared.isascii() and declared.isdigit() else 0
