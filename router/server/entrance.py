"""What a request passes while its body is still unread: a refusal for lack of room must cost next to nothing.

What was not read of a body is taken off the wire behind the answer, by the connection's own parser, so that it is not
taken for the next request and its sender, who writes before he reads, finds the answer.
"""

from __future__ import annotations

from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from common.errors import RequestError
from router.auth.visit import Visit
from router.generation.service import Service
from router.request.body import discard
from router.request.paths import COMPLETION_PATH, GENERATING

MAX_OTHER_BYTES, MAX_TOKEN_BYTES = 64 * 1024, 128
"""A conversation's body holds at most so many bytes beside its messages, and these so many for each token."""


def generates(scope: Mapping[str, object]) -> bool:
    """Whether the request asks for an answer of the model."""
    return scope["method"] == "POST" and scope["path"] in GENERATING


def check_entrance(service: Service, visit: Visit, headers: Headers) -> None:
    """Raises RequestError for a generation request that cannot be served now, whatever is in its body. Counts it."""
    try:
        service.check_open()
        service.gate.check_tokens(visit)
        num_bytes = (
            declared_bytes(headers) if visit.path != COMPLETION_PATH else 0
        )  # others may hold many short prompts
        service.client.check_room(lambda num_tokens: num_bytes > MAX_OTHER_BYTES + MAX_TOKEN_BYTES * num_tokens)
    except RequestError as error:
        service.hint(error)
        log, _ = service.begin(visit, headers)
        log.fail(error)
        log.end()
        raise


def declared_bytes(headers: Headers) -> int:
    """The body's `Content-Length`; 0 when it does not say."""
    declared = headers.get("content-length", "0")
    return int(declared) if declared.isascii() and declared.isdigit() else 0


def closes(headers: Headers) -> dict[str, str]:
    """Headers of an answer to a request whose body was not asked for: who waits to be asked is not asked any more."""
    return {"connection": "close"} if headers.get("expect", "").lower() == "100-continue" else {}


async def clear_the_way(scope: Scope, headers: Headers, receive: Receive) -> None:
    """Before an answer after which the connection is closed: what the client is sending would reset it."""
    last = scope["http_version"] == "1.0" or "close" in headers.get("connection", "").lower()
    if last and not closes(headers):
        await discard(receive)
