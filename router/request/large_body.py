"""Large bodies, parsed and checked in a thread while the event loop serves small requests.

C code that creates a million objects blocks all other threads. So the values of a body are counted while it arrives
(`ValueCounter`), and it is split into fields without parsing them: unknown fields are skipped, a prompt that cannot fit
the model is refused by its number of commas, and the rest is parsed piece by piece.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

import msgspec
import orjson
from pydantic import BaseModel

from common.errors import ContextLengthExceeded, InvalidRequest
from router.request.body import LARGE_BYTES, BodyLease, validated
from router.text import ValueCounter

M = TypeVar("M", bound=BaseModel)
Result = TypeVar("Result")

MAX_FIELD_BYTES = 1024 * 1024
"""The size of a field outside the prompt, in a large body."""
PROMPT_FIELDS = frozenset(("prompt", "messages", "input", "tokens"))
Pieces = dict[str, msgspec.Raw]


class Threads(Protocol):
    """Runs long jobs in threads, a bounded number at once."""

    async def apart(self, job: Callable[[], Result], size: int = ...) -> Result: ...


class LargeBodies:
    """`max_model_len` gives the most tokens of a prompt, `max_ids` the most token ids that are made into text."""

    def __init__(self, threads: Threads, max_model_len: Callable[[], int], max_ids: Callable[[], int]) -> None:
        self._threads, self._max_model_len, self._max_ids = threads, max_model_len, max_ids

    async def model(self, data: bytes | bytearray, model: type[M], lease: BodyLease) -> M:
        """The body as a checked `model`. Sets the `rest_bytes` of the lease.

        Raises RequestError, such as Unavailable when too many bodies wait.
        """
        max_model_len, max_ids = self._max_model_len(), self._max_ids()
        return await self._threads.apart(lambda: parse_large(data, model, max_model_len, max_ids, lease), len(data))


def parse_large(
    data: bytes | bytearray, model: type[M], max_model_len: int, max_ids: int, lease: BodyLease | None = None
) -> M:
    """As `body.parse`, but the values of unknown fields are not checked to be JSON. Raises InvalidRequest.

    Sets the `rest_bytes` of the lease.
    """
    try:
        fields = msgspec.json.decode(data, type=Pieces)
    except msgspec.ValidationError as error:
        raise InvalidRequest("the body must be a JSON object") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    names = getattr(model, "known_fields", model.model_fields)
    known = {name: memoryview(raw) for name, raw in fields.items() if name in names}
    parsed = validated({name: _value(name, raw, max_model_len, max_ids) for name, raw in known.items()}, model)
    if lease is not None:
        lease.rest_bytes = _rest_bytes(known)
    return parsed


def _rest_bytes(fields: Mapping[str, memoryview]) -> int:
    """Memory of the fields that are not the prompt, in bytes: their text and their objects."""
    rest = [bytes(raw) for name, raw in fields.items() if name not in PROMPT_FIELDS]
    num_bytes = sum(map(len, rest))
    counter = ValueCounter("the body has", max_values=num_bytes, max_numbers=num_bytes)
    for text in rest:
        counter.add(text)
    return num_bytes + counter.kept_bytes


def check_number_of_ids(num_ids: int, max_ids: int) -> None:
    """Bound the `tokens` that are to be made into text. Raises InvalidRequest."""
    if num_ids > max_ids:
        raise InvalidRequest(f"tokens: {num_ids:,} ids, at most {max_ids:,} are made into text", param="tokens")


def _value(name: str, raw: memoryview, max_model_len: int, max_ids: int) -> object:
    if name not in PROMPT_FIELDS and len(raw) > MAX_FIELD_BYTES:
        raise InvalidRequest(
            f"{name}: may have at most {MAX_FIELD_BYTES:,} bytes of JSON, not {len(raw):,}", param=name
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
    """Whether JSON looks like token ids."""
    return _is_list(raw) and bytes(raw[1:64]).lstrip()[:1].isdigit()


def _num_elements(raw: memoryview) -> int:
    """Elements of a list of numbers that is not empty."""
    return bytes(raw).count(b",") + 1


def _check_number(name: str, raw: memoryview, max_model_len: int, place: str = "") -> None:
    """Bound the token ids of a prompt. Raises ContextLengthExceeded."""
    num_tokens = _num_elements(raw) if name == "prompt" and _holds_numbers(raw) else 0
    if num_tokens >= max_model_len:
        raise ContextLengthExceeded(num_tokens, max_model_len, where=f"{name}{place}")


def _object(raw: memoryview) -> object:
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
