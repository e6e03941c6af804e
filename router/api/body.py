"""Reads a JSON body: its size is bounded while it arrives, before anything is parsed."""

from __future__ import annotations

import asyncio
from typing import TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from diptych.common.errors import InvalidRequest
from diptych.router.api.errors import BodyTimeout, BodyTooLarge, UnsupportedMediaType, invalid_field

M = TypeVar("M", bound=BaseModel)

BODY_TIMEOUT_S = 60.0
MAX_DISCARDED_BYTES = 64 * 1024 * 1024
"""How much of a refused body is still taken off the wire, so that its sender gets to read the answer."""
DISCARD_TIMEOUT_S = 2.0


async def read_model(request: Request, model: type[M], max_bytes: int) -> M:
    """The body as a checked `model`. Raises RequestError, or ClientDisconnect when the client leaves meanwhile."""
    data = await read_body(request, max_bytes)
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object")
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise invalid_field(error, body) from error


async def read_body(request: Request, max_bytes: int) -> bytes:
    """At most `max_bytes`. Raises UnsupportedMediaType, BodyTooLarge, BodyTimeout."""
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise UnsupportedMediaType(f"the body must be application/json, not {kind[:100]!r}")
    declared = request.headers.get("content-length", "0")
    if declared.isascii() and declared.isdigit() and int(declared) > max_bytes:
        await _discard(request, 0)
        raise _too_large(f"{int(declared):,} bytes", max_bytes)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for part in request.stream():
                size += len(part)
                if size > max_bytes:
                    break
                parts.append(part)
    except TimeoutError as error:
        raise BodyTimeout(f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from error
    if size > max_bytes:
        await _discard(request, size)
        raise _too_large(f"more than {max_bytes:,} bytes", max_bytes)
    return b"".join(parts)


def _too_large(size: str, max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body has {size}, this server takes {max_bytes:,}")


async def _discard(request: Request, size: int) -> None:
    """Take what still arrives, within bounds: closing at once would reset the connection under the answer."""
    try:
        async with asyncio.timeout(DISCARD_TIMEOUT_S):
            while size < MAX_DISCARDED_BYTES:
                message = await request.receive()
                size += len(message.get("body", b""))
                if not message.get("more_body", False):
                    return
    except TimeoutError:  # a sender this slow gets the answer and a closed connection
        return
