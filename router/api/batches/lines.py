"""Input lines of a batch: read from the store in chunks, and validated before any line is executed."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec

from common.errors import ModelNotFound
from router.api.batches.batch_format import MAX_ID_CHARS, MAX_SHOWN_CHARS
from router.request import LARGE_BYTES
from router.stored import BatchProblem, FileStore

READ_BYTES = 256 * 1024
"""Bytes of a file that are read and parsed at a time."""
TURN_BYTES = 8 * 1024
"""Bytes of a file to split into lines before yielding to the event loop."""
LINES_A_TURN = 32
"""Lines to parse before yielding to the event loop."""
ENVELOPE_BYTES = 4096
"""Maximum size of a line without the body of its request."""
MAX_PROBLEMS = 100
"""Maximum number of errors that a failed batch reports."""
MAX_MEMBER_BYTES = 16 * 1024
"""Maximum size of a member's JSON that is parsed here. Longer JSON is kept as text for error messages."""
NULL = msgspec.Raw(b"null")


class InvalidLine(Exception):
    """An invalid line, which makes its batch fail."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.param = code, param

    def problem(self, number: int) -> BatchProblem:
        return BatchProblem(self.code, str(self), number, self.param)


class _Line(msgspec.Struct):
    custom_id: msgspec.Raw = NULL
    method: msgspec.Raw = NULL
    url: msgspec.Raw = NULL
    body: msgspec.Raw = msgspec.Raw()


class _Body(msgspec.Struct):
    model: msgspec.Raw = NULL
    stream: msgspec.Raw = NULL
    background: msgspec.Raw = NULL
    service_tier: msgspec.Raw = NULL
    request_class: msgspec.Raw = NULL


@dataclass(frozen=True, slots=True)
class InputLine:
    """Line `number` of a batch. `body` is sent to the batch's endpoint. `names_class`: the body names its class."""

    number: int
    custom_id: str
    body: bytes
    model: Any = None
    names_class: bool = False


@dataclass
class ValidationReport:
    """Result of validating all lines. `model` is the model of all lines, or None if they name several."""

    num_lines: int = 0
    models: set[str] = field(default_factory=set)
    problems: list[BatchProblem] = field(default_factory=list)

    @property
    def model(self) -> str | None:
        return next(iter(self.models)) if len(self.models) == 1 else None


def parse_line(number: int, line: bytes, endpoint: str) -> InputLine:
    """Parse a line as a request to `endpoint`. Raises InvalidLine. The body is validated when the line is executed."""
    try:
        fields = msgspec.json.decode(line, type=_Line)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidLine("invalid_json_line", f"This line is not a valid JSON object: {error}") from error
    name, method, url = _value(fields.custom_id), _value(fields.method), _value(fields.url)
    if name is None:
        raise InvalidLine("missing_required_parameter", "custom_id is required", "custom_id")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_ID_CHARS:
        raise InvalidLine(
            "invalid_request", f"custom_id must be a string of 1 to {MAX_ID_CHARS} characters", "custom_id"
        )
    if method != "POST":
        raise InvalidLine("invalid_method", f"method must be POST, got {_shown(method)}", "method")
    if url != endpoint:
        raise InvalidLine("url_mismatch", f"url must be the batch's endpoint {endpoint!r}, got {_shown(url)}", "url")
    return _with_body(number, name, bytes(fields.body))


def _value(raw: msgspec.Raw) -> Any:
    """Parse a member of a valid object. Returns only its first bytes if it is long or nested too deeply.

    Raises InvalidLine: `msgspec.Raw` checks neither UTF-8 nor the range of numbers.
    """
    view = memoryview(raw)
    if len(view) <= MAX_MEMBER_BYTES:
        try:
            return msgspec.json.decode(view)
        except RecursionError:
            pass
        except msgspec.MsgspecError as error:
            raise InvalidLine("invalid_json_line", f"This line has an invalid value: {error}") from error
    return bytes(view[:MAX_SHOWN_CHARS])


def _with_body(number: int, name: str, body: bytes) -> InputLine:
    if not body:
        raise InvalidLine("missing_required_parameter", "body is required", "body")
    try:
        fields = msgspec.json.decode(body, type=_Body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidLine("invalid_request", "body must be a JSON object", "body") from error
    for param in ("stream", "background"):
        if _value(getattr(fields, param)):
            raise InvalidLine("invalid_request", f"{param} is not supported in batches", f"body.{param}")
    names_class = any(_value(named) is not None for named in (fields.service_tier, fields.request_class))
    return InputLine(number, name, body, _value(fields.model), names_class)


async def parsed(number: int, line: bytes, endpoint: str) -> InputLine:
    """Run `parse_line`, in a thread if the line is long. Raises InvalidLine."""
    if len(line) <= LARGE_BYTES:
        return parse_line(number, line, endpoint)
    return await asyncio.to_thread(parse_line, number, line, endpoint)


async def _pieces_of(store: FileStore, file_id: str) -> AsyncGenerator[bytes, None]:
    """Yield the bytes of a file in chunks. Yields to the event loop after each chunk. Raises StoreFailed."""
    after = -1
    while pieces := await store.read(file_id, after, READ_BYTES):
        for after, piece in pieces:  # noqa: B007 (the next read begins after the last number)
            for begin in range(0, len(piece), TURN_BYTES):
                yield piece[begin : begin + TURN_BYTES]
                await asyncio.sleep(0)


async def lines_of(store: FileStore, file_id: str, max_bytes: int) -> AsyncGenerator[tuple[int, bytes | None], None]:
    """Yield the non-empty lines of a file with their numbers, from 1; None for lines longer than `max_bytes`.

    Raises StoreFailed.
    """
    number, parts, size = 1, [b""], 0
    async with aclosing(_pieces_of(store, file_id)) as pieces:
        async for piece in pieces:
            if not size and piece.isspace():  # leading white space is ignored
                number += piece.count(b"\n")
                continue
            *ended, rest = piece.split(b"\n")
            if ended:
                first = b"".join((*parts, ended[0])) if size + len(ended[0]) <= max_bytes else None
                whole = [first, *(line if len(line) <= max_bytes else None for line in ended[1:])]
                found = [(i, line) for i, line in enumerate(whole, number) if line is None or line.strip()]
                number, parts, size = number + len(ended), [], 0
                for turn, (i, line) in enumerate(found):
                    yield i, line
                    if turn % LINES_A_TURN == 0:
                        await asyncio.sleep(0)
            size += len(rest)
            parts = [*parts, rest] if size <= max_bytes else []
    if size > max_bytes:
        yield number, None
    elif last := b"".join(parts).strip():
        yield number, last


async def validate_lines(
    lines: AsyncIterator[tuple[int, bytes | None]],
    endpoint: str,
    check_model: Callable[[Any], str],
    *,
    max_lines: int,
    max_bytes: int,
    stopped: Callable[[], bool],
) -> ValidationReport:
    """Validate all lines, until `stopped` or `MAX_PROBLEMS` errors. `check_model` raises ModelNotFound."""
    report, known = ValidationReport(), set()
    async for number, line in lines:
        report.num_lines += 1
        if stopped():
            return report
        if report.num_lines > max_lines:
            text = f"The file has more than {max_lines:,} requests, the maximum of a batch."
            report.problems = [BatchProblem("too_many_tasks", text, number)]
            return report
        try:
            if line is None:
                raise InvalidLine("invalid_request", f"This line exceeds the limit of {max_bytes:,} bytes.")
            request = await parsed(number, line, endpoint)
            mark = hashlib.blake2b(request.custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
            if mark in known:
                raise InvalidLine(
                    "duplicate_custom_id",
                    f"custom_id must be unique; {_shown(request.custom_id)} is used by another line",
                    "custom_id",
                )
            known.add(mark)
            report.models.add(_model_of(request, check_model))
        except InvalidLine as fault:
            report.problems.append(fault.problem(number))
            if len(report.problems) >= MAX_PROBLEMS:
                return report
    if not report.num_lines:
        report.problems.append(BatchProblem("empty_file", "The file contains no requests."))
    return report


def _model_of(request: InputLine, check_model: Callable[[Any], str]) -> str:
    if request.model is not None and not isinstance(request.model, str):
        raise InvalidLine("invalid_request", "model must be a string", "body.model")
    try:
        return check_model(request.model)
    except ModelNotFound as unknown:
        raise InvalidLine("model_not_found", unknown.message, "body.model") from unknown


def _shown(value: object) -> str:
    shown = value.decode(errors="replace") if isinstance(value, bytes) else repr(value)
    return shown if len(shown) <= MAX_SHOWN_CHARS else shown[:MAX_SHOWN_CHARS] + "…"
