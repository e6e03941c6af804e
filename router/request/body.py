"""Reads JSON bodies, whose size is bounded while they arrive, before anything is parsed."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self, TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from common.errors import InvalidRequest, Unavailable
from router.request.content_encoding import decoded, encoding_of
from router.request.errors import BodyTimeout, BodyTooLarge, UnsupportedMediaType, invalid_field
from router.text.json_values import MAX_NUMBERS, ValueCounter

M = TypeVar("M", bound=BaseModel)

BODY_TIMEOUT_S = 60.0
"""How long a body may take to arrive."""

SMALL_BYTES = 64 * 1024
"""A body of this size always finds room."""
MAX_BODIES = 32
"""How many bodies of the largest size may be held at once."""
BUSY_RETRY_S = 2.0
"""The hint of a refusal while other bodies hold all room."""

LARGE_BYTES = 256 * 1024
"""The values of smaller bodies are not counted while they arrive."""
MANY_VALUES = 4096
"""Smaller bodies of fewer values are parsed on the event loop, in a few milliseconds at worst."""
SEPARATORS = b",[{"


class BodyBudget:
    """Bytes of all bodies that are being read or turned into prompts."""

    def __init__(self, max_body_bytes: int) -> None:
        self.max_body_bytes = max_body_bytes
        self.max_bytes = MAX_BODIES * max_body_bytes
        self.num_bytes = 0

    def lease(self) -> BodyLease:
        """Room for one body until the end of a `with` block."""
        return BodyLease(self)


class BodyLease:
    """One body's part of the budget."""

    def __init__(self, budget: BodyBudget) -> None:
        self.budget = budget
        self._num_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Count more bytes. Raises Unavailable when other bodies hold the room."""
        self._num_bytes += num_bytes
        self.budget.num_bytes += num_bytes
        if self._num_bytes > SMALL_BYTES and self.budget.num_bytes > self.budget.max_bytes:
            held = f"{self.budget.num_bytes:,} bytes of request bodies are held, the bound is {self.budget.max_bytes:,}"
            raise Unavailable(held, retry_after_s=BUSY_RETRY_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.budget.num_bytes -= self._num_bytes
        self._num_bytes = 0


def is_large(data: bytes | bytearray) -> bool:
    """Whether parsing JSON takes longer than the event loop may: commas and opened brackets bound its values."""
    return len(data) > LARGE_BYTES or sum(map(data.count, SEPARATORS)) > MANY_VALUES


def parse(data: bytes | bytearray, model: type[M]) -> M:
    """The body as a checked `model`. Raises InvalidRequest."""
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object")
    return validated(body, model)


def validated(body: dict[str, object], model: type[M]) -> M:
    """A JSON object as a checked `model`. Raises InvalidRequest with the most specific of its problems."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise invalid_field(error, body) from error


async def read_body(request: Request, lease: BodyLease, max_numbers: int = MAX_NUMBERS) -> bytearray:
    """Read and decode a body of at most `max_body_bytes`.

    Raises UnsupportedMediaType, BodyTooLarge, BodyTimeout, Unavailable, and InvalidRequest for data that does not match
    its encoding and for JSON with too many values.
    """
    max_bytes = lease.budget.max_body_bytes
    _check_content_type(request.headers.get("content-type", ""))
    encoding = encoding_of(request.headers)
    declared = request.headers.get("content-length", "0")
    if declared.isascii() and declared.isdigit() and int(declared) > max_bytes:
        raise _too_large(f"{int(declared):,} bytes", max_bytes)
    data, counter, num_counted = bytearray(), ValueCounter("the body has", max_numbers=max_numbers), 0
    size = 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for part in decoded(request.stream(), encoding, max_bytes) if encoding else request.stream():
                size += len(part)
                if size > max_bytes:
                    break
                lease.take(len(part))
                data += part
                if size > LARGE_BYTES:
                    counter.add(part if num_counted else data)
                    num_counted = size
    except TimeoutError as error:
        raise BodyTimeout(f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from error
    if size > max_bytes:
        raise _too_large(f"more than {max_bytes:,} bytes{' when decoded' if encoding else ''}", max_bytes)
    return data


def _check_content_type(named: str) -> None:
    """Raise UnsupportedMediaType unless it is JSON, which browsers send cross-site only with the server's consent."""
    kind = named.partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        what = f"Content-Type {kind[:100]!r} is not JSON" if kind else "the request has no Content-Type"
        raise UnsupportedMediaType(f"{what}: send the header Content-Type: application/json")


def _too_large(size: str, max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body has {size}; the maximum is {max_bytes:,}")
