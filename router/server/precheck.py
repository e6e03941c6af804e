"""Checks of a generation request before its body is read, so that refusals for lack of capacity cost little.

After such a refusal, the connection's parser still reads the rest of the body. The body is therefore not parsed as the
next request, and a client that writes its whole body before it reads receives the answer.
"""

from __future__ import annotations

from collections.abc import Mapping

from starlette.datastructures import Headers

from common.errors import RequestError
from router.access import HEADER, ClientRequest, caller_of
from router.generation import RouterState
from router.request import COMPLETION_PATH, GENERATING, INVOCATIONS_PATH, POOLING

MANY_PROMPTS = POOLING | {COMPLETION_PATH, INVOCATIONS_PATH}
MAX_OTHER_BYTES, MAX_TOKEN_BYTES = 64 * 1024, 128
"""Maximum size of a conversation's body without its messages, and maximum size of messages per token."""


def generates(scope: Mapping[str, object]) -> bool:
    """Whether the request is for a generation endpoint."""
    return scope["method"] == "POST" and scope["path"] in GENERATING


def precheck(router_state: RouterState, client_request: ClientRequest, headers: Headers) -> None:
    """Raise RequestError, and count it, if a generation request would be refused whatever its body."""
    try:
        router_state.check_open()
        router_state.access.check_tokens(client_request)
        # These bodies may contain many short prompts, so their size says nothing about the longest prompt.
        num_bytes = 0 if client_request.path in MANY_PROMPTS else declared_bytes(headers)
        caller = caller_of(router_state.config.classes, client_request.key, headers.get(HEADER, ""))
        router_state.check_capacity(
            lambda num_tokens: num_bytes > MAX_OTHER_BYTES + MAX_TOKEN_BYTES * num_tokens, caller
        )
    except RequestError as error:
        router_state.add_retry_after(error)
        log, _ = router_state.begin(client_request, headers)
        log.fail(error)
        log.end()
        raise


def declared_bytes(headers: Headers) -> int:
    """Return the `Content-Length`; 0 if it is missing or invalid."""
    declared = headers.get("content-length", "0")
    return int(declared) if declared.isascii() and declared.isdigit() else 0
