"""Reading of JSON request bodies, with limits on size and memory that are enforced before anything is parsed.

A body waits as bytes until memory for its objects is available, which take many times as much:

    bytes arrive ─> values are counted ─> memory for objects ─> parsed ─> rendered ─> prompt in tokens
    503: byte budget is exhausted         503 after 60 s                              objects are released
"""

from __future__ import annotations

import asyncio
import zlib
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Protocol, Self, TypeVar

import msgspec
import orjson
from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers
from starlette.requests import Request

from common.errors import ContextLengthExceeded, InvalidRequest, Unavailable
from router.request.errors import BodyTimeout, BodyTooLarge, UnsupportedMediaType, invalid_field
from router.text import MAX_NUMBERS, VALUE_BYTES, ValueCounter

ACCEPTED = "gzip, deflate"
FIRST_BYTES, DECODED_BYTES = 64 * 1024, 256 * 1024
"""Number of bytes to decode per step. If a part is no larger than `FIRST_BYTES`, its first piece is decoded on the
event loop, in 0.1 ms. All other pieces are decoded in a thread."""


def encoding_of(headers: Headers) -> str:
    """Return the content encoding of a body: gzip, deflate, or "" for none. Raises UnsupportedMediaType."""
    named = ",".join(headers.getlist("content-encoding")).strip().lower().removeprefix("x-")
    if named in ("", "identity"):
        return ""
    if named not in ("gzip", "deflate"):
        raise UnsupportedMediaType(f"Content-Encoding: {named[:100]!r} is not supported (expected one of {ACCEPTED})")
    return named


async def decoded(parts: AsyncIterable[bytes], encoding: str, max_bytes: int) -> AsyncIterator[bytes]:
    """Decode a body in pieces of at most `DECODED_BYTES`. `max_bytes` limits the total size of the encoded `parts`.

    Raises BodyTooLarge, and InvalidRequest for invalid or incomplete data.
    """
    decoder, head, size = None, b"", 0
    try:
        async for part in parts:
            size += len(part)
            if size > max_bytes:
                raise BodyTooLarge(f"the encoded body has more than {max_bytes:,} bytes, which is the maximum")
            if decoder is None:
                part = head = head + part
                if len(head) < 2:
                    continue
                decoder = zlib.decompressobj(_window(head, encoding))
            is_first = len(part) <= FIRST_BYTES
            while part:
                if decoder.eof:
                    raise InvalidRequest(f"The body has data after the end of its {encoding} encoding.")
                if is_first:
                    yield decoder.decompress(part, FIRST_BYTES)
                else:
                    yield await asyncio.to_thread(decoder.decompress, part, DECODED_BYTES)
                part, is_first = decoder.unconsumed_tail or decoder.unused_data, False
        while decoder is None or not decoder.eof:  # the decoder may still hold decoded data
            rest = b"" if decoder is None else decoder.decompress(b"", FIRST_BYTES)
            if not rest:
                raise InvalidRequest(f"The {encoding} data of the body is incomplete.")
            yield rest
    except zlib.error as error:
        raise InvalidRequest(f"The body is not valid {encoding} data ({error}).") from error


def _window(head: bytes, encoding: str) -> int:
    """Return zlib's `wbits`. Some clients send deflate data without the zlib header that RFC 9110 requires."""
    if encoding == "gzip":
        return 16 + zlib.MAX_WBITS
    has_header = head[0] & 0x0F == 8 and int.from_bytes(head[:2], "big") % 31 == 0
    return zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS


M = TypeVar("M", bound=BaseModel)
Result = TypeVar("Result")

BODY_TIMEOUT_S = 60.0
"""Maximum time for a body to arrive, in seconds."""

SMALL_BYTES = 64 * 1024
"""Bodies up to this size are accepted even if the budget is exhausted."""
SMALL_OBJECT_BYTES = 256 * 1024
"""Objects up to this size are not counted, so a conversation of 100 messages never waits for memory."""
MAX_BODIES = 32
"""Number of bodies of the maximum size, without their objects, that fit in the budget."""
MIN_BUDGET_BYTES = 256 * 1024 * 1024
"""Minimum byte budget. It also covers objects, such as tools, that are retained until the answer is complete."""
OBJECT_BYTES = 64 * 1024 * 1024
"""Memory for objects of bodies that are being converted to prompts. A larger body is processed on its own."""
OBJECTS_TIMEOUT_S = 60.0
"""Maximum time that a body waits for memory for its objects, in seconds."""
UNCOUNTED_REST_BYTES = 2 * 1024 * 1024
"""Memory of a request's fields, such as tools, that is not counted while the answer is generated."""
BUSY_RETRY_S = 2.0
"""`Retry-After` of rejections while other bodies use the whole budget, in seconds."""

LARGE_BYTES = 256 * 1024
"""Minimum size of a body whose values are counted while it arrives."""
MANY_VALUES = 4096
"""Minimum number of values for parsing in a thread. Smaller bodies are parsed on the event loop, in a few ms."""
SEPARATORS = b",[{"


class BodyBudget:
    """Memory budget for bodies that are being read or converted to prompts. Use from one event loop.

    `num_bytes` counts text, and objects of long bodies, such as tools, that are retained until the request completes.
    `object_bytes` counts all other objects.
    """

    def __init__(self, max_body_bytes: int) -> None:
        self.max_body_bytes = max_body_bytes
        self.max_bytes = max(MIN_BUDGET_BYTES, MAX_BODIES * max_body_bytes)
        self.num_bytes = self.object_bytes = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def lease(self) -> BodyLease:
        """Return a lease for one body, to be used in a `with` block."""
        return BodyLease(self)

    async def reserve_objects(self, num_bytes: int) -> None:
        """Wait in FIFO order for memory for the objects of one body. Raises Unavailable after `OBJECTS_TIMEOUT_S`."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((num_bytes, turn))
        self._serve_waiting()
        try:
            async with asyncio.timeout(OBJECTS_TIMEOUT_S):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                self.release_objects(num_bytes)
            else:
                with suppress(ValueError):  # `_serve_waiting` may have removed it
                    self._waiting.remove((num_bytes, turn))
                self._serve_waiting()
            if not isinstance(error, TimeoutError):
                raise
            raise Unavailable(
                f"No memory for the body within {OBJECTS_TIMEOUT_S:g} s: the objects of other bodies use "
                f"{self.object_bytes:,} bytes; the maximum is {OBJECT_BYTES:,}",
                retry_after_s=BUSY_RETRY_S,
            ) from error

    def release_objects(self, num_bytes: int) -> None:
        """Release a reservation."""
        self.object_bytes -= num_bytes
        self._serve_waiting()

    def _serve_waiting(self) -> None:
        while self._waiting:
            num_bytes, turn = self._waiting[0]
            if turn.cancelled():
                self._waiting.popleft()
                continue
            if self.object_bytes and self.object_bytes + num_bytes > OBJECT_BYTES:
                return
            self._waiting.popleft()
            self.object_bytes += num_bytes
            turn.set_result(None)


class BodyLease:
    """One body's share of the budget. `rest_bytes` is the memory that is retained until the request completes."""

    def __init__(self, budget: BodyBudget) -> None:
        self.budget = budget
        self._num_bytes = self._object_bytes = self.rest_bytes = 0

    def count(self, num_bytes: int) -> None:
        """Count more bytes without checking the budget."""
        self._num_bytes += num_bytes
        self.budget.num_bytes += num_bytes

    def take(self, num_bytes: int) -> None:
        """Count more bytes. Raises Unavailable if the budget is exhausted."""
        self.count(num_bytes)
        if self._num_bytes > SMALL_BYTES and self.budget.num_bytes > self.budget.max_bytes:
            raise Unavailable(
                f"Request bodies use {self.budget.num_bytes:,} bytes; the maximum is {self.budget.max_bytes:,}",
                retry_after_s=BUSY_RETRY_S,
            )

    async def take_objects(self, num_bytes: int) -> None:
        """Wait for memory for the objects of the body. Raises Unavailable."""
        await self.budget.reserve_objects(num_bytes)
        self._object_bytes += num_bytes

    def take_more_objects(self, texts: Iterable[bytes]) -> None:
        """Count the objects of stored JSON that the body continues. Does not wait, because the body may hold memory.

        Raises Unavailable if no memory is available, and InvalidRequest for too many values.
        """
        counter = ValueCounter("the stored conversation has")
        for text in texts:
            counter.add(text)
        num_bytes, budget = counter.object_bytes, self.budget
        if num_bytes <= SMALL_OBJECT_BYTES:
            return
        if budget.object_bytes and budget.object_bytes + num_bytes > OBJECT_BYTES:
            raise Unavailable(
                f"No memory for the {num_bytes:,} bytes of the stored conversation: the objects of other bodies use "
                f"{budget.object_bytes:,} bytes; the maximum is {OBJECT_BYTES:,}",
                retry_after_s=BUSY_RETRY_S,
            )
        budget.object_bytes += num_bytes
        self._object_bytes += num_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def keep_rest(self) -> None:
        """Release everything except the fields that are required until the answer is complete. Never raises."""
        self.release()
        self.count(max(0, self.rest_bytes - UNCOUNTED_REST_BYTES))

    def release(self) -> None:
        """Release all memory. Idempotent."""
        self.budget.num_bytes -= self._num_bytes
        self.budget.release_objects(self._object_bytes)
        self._num_bytes = self._object_bytes = 0


def _most_values(data: bytearray) -> int:
    """Return an upper bound on the number of JSON values: each except the first follows a separator."""
    return len(data) - len(data.translate(None, SEPARATORS))


def parse(data: bytes | bytearray, model: type[M]) -> M:
    """Parse and validate a body. Raises InvalidRequest."""
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise InvalidRequest("The body must be a JSON object.")
    return validated(body, model)


def validated(body: dict[str, object], model: type[M]) -> M:
    """Validate a JSON object. Raises InvalidRequest for the most specific problem."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise invalid_field(error, body) from error


async def upload_parts(request: Request, what: str) -> AsyncIterator[bytes]:
    """Return a large body in parts as they arrive. `what` begins the error.

    Raises BodyTimeout if no data arrives for `BODY_TIMEOUT_S`, and ClientDisconnect.
    """
    stream = aiter(request.stream())
    while True:
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                data = await anext(stream, None)
        except TimeoutError as error:
            raise BodyTimeout(f"No data of {what} arrived for {BODY_TIMEOUT_S:g} s.") from error
        if data is None:
            return
        yield data


async def read_body(request: Request, lease: BodyLease, max_model_len: Callable[[], int]) -> tuple[bytearray, bool]:
    """Read and decode a body, and wait for memory for its objects.

    Also returns whether the body is too large to parse on the event loop. Raises UnsupportedMediaType, BodyTooLarge,
    BodyTimeout, Unavailable, and InvalidRequest for invalid encoded data and for JSON with too many values.
    """
    max_bytes = lease.budget.max_body_bytes
    _check_content_type(request.headers.get("content-type", ""))
    encoding = encoding_of(request.headers)
    declared = request.headers.get("content-length", "0")
    if declared.isascii() and declared.isdigit() and int(declared) > max_bytes:
        raise _too_large(f"{int(declared):,} bytes", max_bytes)
    data, size, num_counted = bytearray(), 0, 0
    counter: ValueCounter | None = None
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for part in decoded(request.stream(), encoding, max_bytes) if encoding else request.stream():
                size += len(part)
                if size > max_bytes:
                    break
                lease.take(len(part))
                data += part
                if size > LARGE_BYTES:
                    counter = counter or _counter(max_model_len)
                    counter.add(part if num_counted else data)
                    num_counted = size
    except TimeoutError as error:
        raise BodyTimeout(f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from error
    if size > max_bytes:
        raise _too_large(f"more than {max_bytes:,} bytes{' when decoded' if encoding else ''}", max_bytes)
    is_large = counter is not None
    if counter is None:
        most_values = _most_values(data)
        is_large = most_values > MANY_VALUES
        if VALUE_BYTES * most_values > SMALL_OBJECT_BYTES:
            counter = _counter(max_model_len)
            counter.add(data)
    if counter is not None and counter.object_bytes > SMALL_OBJECT_BYTES:
        await lease.take_objects(counter.object_bytes)
    return data, is_large


def _counter(max_model_len: Callable[[], int]) -> ValueCounter:
    """Create a counter for a large body. A prompt of token ids may have `max_model_len` numbers."""
    return ValueCounter("the body has", max_numbers=max(MAX_NUMBERS, max_model_len()))


def _check_content_type(named: str) -> None:
    """Raise UnsupportedMediaType unless it is JSON. Browsers send JSON cross-site only with the server's consent."""
    kind = named.partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        what = f"unsupported Content-Type {kind[:100]!r}" if kind else "missing Content-Type"
        raise UnsupportedMediaType(f"{what}: must be application/json")


def _too_large(size: str, max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body has {size}; the maximum is {max_bytes:,}")


MAX_FIELD_BYTES = 1024 * 1024
"""Maximum size of a field outside the prompt, in a large body."""
PROMPT_FIELDS = frozenset(("prompt", "messages", "input", "tokens"))
Pieces = dict[str, msgspec.Raw]


class Threads(Protocol):
    """Bounded thread pool for long jobs."""

    async def apart(self, job: Callable[[], Result], size: int = ...) -> Result: ...


class BodyReader:
    """Reads bodies and validates their fields.

    `max_model_len` returns the maximum number of prompt tokens, `max_ids` the maximum number of ids to detokenize.
    """

    def __init__(self, threads: Threads, max_model_len: Callable[[], int], max_ids: Callable[[], int]) -> None:
        self._threads, self._max_model_len, self._max_ids = threads, max_model_len, max_ids

    async def read(self, request: Request, model: type[M], lease: BodyLease) -> M:
        """Read and validate the body of a request. Sets `rest_bytes` of the lease.

        Raises RequestError, such as Unavailable if too many bodies are queued, and ClientDisconnect.
        """
        data, is_large = await read_body(request, lease, self._max_model_len)
        if not is_large:
            return parse(data, model)
        max_model_len, max_ids = self._max_model_len(), self._max_ids()
        return await self._threads.apart(lambda: parse_large(data, model, max_model_len, max_ids, lease), len(data))


def parse_large(
    data: bytes | bytearray, model: type[M], max_model_len: int, max_ids: int, lease: BodyLease | None = None
) -> M:
    """Parse a large body like `parse`, without validating the JSON of unknown fields. Raises InvalidRequest.

    Sets `rest_bytes` of the lease.
    """
    try:
        fields = msgspec.json.decode(data, type=Pieces)
    except msgspec.ValidationError as error:
        raise InvalidRequest("The body must be a JSON object.") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}") from error
    names = getattr(model, "known_fields", model.model_fields)
    known = {name: memoryview(raw) for name, raw in fields.items() if name in names}
    parsed = validated({name: _value(name, raw, max_model_len, max_ids) for name, raw in known.items()}, model)
    if lease is not None:
        lease.rest_bytes = _rest_bytes(known)
    return parsed


def _rest_bytes(fields: Mapping[str, memoryview]) -> int:
    """Return the memory of the fields outside the prompt, in bytes: their text and their objects."""
    rest = [bytes(raw) for name, raw in fields.items() if name not in PROMPT_FIELDS]
    num_bytes = sum(map(len, rest))
    counter = ValueCounter("the body has", max_values=num_bytes, max_numbers=num_bytes)
    for text in rest:
        counter.add(text)
    return num_bytes + counter.kept_bytes


def check_number_of_ids(num_ids: int, max_ids: int) -> None:
    """Limit the `tokens` to detokenize. Raises InvalidRequest."""
    if num_ids > max_ids:
        raise InvalidRequest(f"tokens: must have at most {max_ids:,} ids, not {num_ids:,}", param="tokens")


def _value(name: str, raw: memoryview, max_model_len: int, max_ids: int) -> object:
    if name not in PROMPT_FIELDS and len(raw) > MAX_FIELD_BYTES:
        raise InvalidRequest(
            f"{name}: must have at most {MAX_FIELD_BYTES:,} bytes of JSON, not {len(raw):,}", param=name
        )
    if name == "tokens" and _is_list(raw):
        check_number_of_ids(_num_elements(raw), max_ids)
    if len(raw) <= LARGE_BYTES or not _is_list(raw) or _holds_numbers(raw):
        _check_number(name, raw, max_model_len)
        return _object(raw)
    pieces = msgspec.json.decode(raw, type=list[msgspec.Raw])
    for i, piece in enumerate(pieces):
        _check_number(name, memoryview(piece), max_model_len, f"[{i}]")
    return [_object(memoryview(piece)) for piece in pieces]


def _is_list(raw: memoryview) -> bool:
    return bytes(raw[:1]) == b"["


def _holds_numbers(raw: memoryview) -> bool:
    """Whether JSON looks like a list of token ids."""
    return _is_list(raw) and bytes(raw[1:64]).lstrip()[:1].isdigit()


def _num_elements(raw: memoryview) -> int:
    """Return the length of a non-empty list of numbers."""
    return bytes(raw).count(b",") + 1


def _check_number(name: str, raw: memoryview, max_model_len: int, place: str = "") -> None:
    """Limit the token ids of a prompt. Raises ContextLengthExceeded."""
    num_tokens = _num_elements(raw) if name == "prompt" and _holds_numbers(raw) else 0
    if num_tokens >= max_model_len:
        raise ContextLengthExceeded(num_tokens, max_model_len, where=f"{name}{place}")


def _object(raw: memoryview) -> object:
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}") from error
