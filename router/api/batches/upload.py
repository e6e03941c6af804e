"""Upload of a file as a multipart form into the store, in chunks and with limits on size and time."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from common.errors import InvalidRequest, RequestError, Unavailable
from router.api.batches.errors import answered
from router.api.batches.fields import LEAST_RESULT_S, MOST_RESULT_S, PURPOSES
from router.request import encoding_of, upload_parts
from router.request.errors import BodyTimeout, BodyTooLarge, UnsupportedMediaType
from router.stored import FileStore, StoredFile, StoreFailed

if TYPE_CHECKING:
    from collections.abc import Iterator

PIECE_BYTES = 256 * 1024
"""Maximum memory of an upload, and size of a row in the store."""
UPLOAD_S = 3600.0
"""Timeout of an upload. Each of its chunks has the timeout of an ordinary request body."""
MAX_UPLOADS = 32
"""Maximum number of concurrent uploads. One key may have half of them."""
MAX_FORM_BYTES = 64 * 1024
"""Maximum size of a form without its file."""
MAX_VALUE_BYTES, MAX_NAME_CHARS = 1024, 255
"""Maximum size of a form field other than the file, and maximum length of a file name."""
MAX_CONTENT_TYPE_CHARS = 1024
"""Parsing the header takes time quadratic in its semicolons. A boundary has at most 70 characters (RFC 2046)."""
BUSY_RETRY_S = 5.0
"""Retry hint for too many uploads. Uploads take seconds."""


class Uploads:
    """Counts the concurrent uploads of a router by key."""

    def __init__(self) -> None:
        self._of: Counter[str] = Counter()

    @contextmanager
    def place(self, owner: str) -> Iterator[None]:
        """Hold an upload slot. Raises Unavailable if there is none."""
        share = MAX_UPLOADS // 2 if owner else MAX_UPLOADS
        if self._of.total() >= MAX_UPLOADS or self._of[owner] >= share:
            raise Unavailable(
                f"Too many concurrent uploads: {self._of.total()} in total, {self._of[owner]} of this key. The limits "
                f"are {MAX_UPLOADS} in total and {share} per key.",
                retry_after_s=BUSY_RETRY_S,
            )
        self._of[owner] += 1
        try:
            yield
        finally:
            self._of[owner] -= 1
            self._of += Counter()  # removes keys without uploads


@dataclass
class UploadForm:
    """State of a form that is being received: `values` by name, and the bytes of the file that are not stored yet."""

    values: dict[str, str] = field(default_factory=dict)
    filename: str | None = None
    waiting: bytearray = field(default_factory=bytearray)
    is_complete: bool = False
    _name: str = ""
    _in_file: bool = False
    _part: bytearray = field(default_factory=bytearray)
    _header: bytearray = field(default_factory=bytearray)
    _value: bytearray = field(default_factory=bytearray)
    _num_other_bytes: int = 0

    def parser(self, boundary: bytes) -> MultipartParser:
        """Create a parser that fills this form. Raises FormParserError for an invalid boundary."""
        return MultipartParser(
            boundary,
            {
                "on_part_begin": self._on_part_begin,
                "on_header_field": lambda data, start, end: self._add(self._header, data[start:end]),
                "on_header_value": lambda data, start, end: self._add(self._value, data[start:end]),
                "on_header_end": self._on_header_end,
                "on_headers_finished": self._on_headers_finished,
                "on_part_data": self._on_part_data,
                "on_part_end": self._on_part_end,
                "on_end": self._on_end,
            },
        )

    def _add(self, to: bytearray, data: bytes) -> None:
        self._num_other_bytes += len(data)
        if self._num_other_bytes > MAX_FORM_BYTES:
            raise InvalidRequest(f"The form exceeds the limit of {MAX_FORM_BYTES:,} bytes without its file.")
        to += data

    def _on_part_begin(self) -> None:
        self._name, self._in_file = "", False
        self._part.clear()
        self._header.clear()
        self._value.clear()

    def _on_header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            _, options = parse_options_header(self._value.decode("latin-1"))
            self._name = options.get(b"name", b"").decode("utf-8", "replace")
            if self._name == "file":
                if self.filename is not None:
                    raise InvalidRequest("file: only one file per request is allowed", param="file")
                self.filename = _clean(options.get(b"filename", b"").decode("utf-8", "replace"))
                self._in_file = True
        self._header.clear()
        self._value.clear()

    def _on_headers_finished(self) -> None:
        if not self._name:
            raise InvalidRequest("A part of the form has no name.")

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._in_file:
            self.waiting += memoryview(data)[start:end]
        else:
            self._add(self._part, data[start:end])
            if len(self._part) > MAX_VALUE_BYTES:
                raise InvalidRequest(f"{self._name[:80]}: must have at most {MAX_VALUE_BYTES:,} bytes")

    def _on_part_end(self) -> None:
        if not self._in_file:
            self.values[self._name] = self._part.decode("utf-8", "replace")

    def _on_end(self) -> None:
        self.is_complete = True


@dataclass
class Upload:
    """State of one upload into the store."""

    store: FileStore
    file: StoredFile
    max_bytes: int
    clock: Callable[[], float] = time.time
    form: UploadForm = field(default_factory=UploadForm)
    num_bytes: int = 0
    num_pieces: int = 0
    has_begun: bool = False

    async def read(self, request: Request) -> StoredFile:
        """Receive and store the file. Raises RequestError, ClientDisconnect."""
        try:
            async with asyncio.timeout(UPLOAD_S):
                await self._receive(request)
            return await self._finish()
        except BaseException as error:
            if self.has_begun:
                with suppress(StoreFailed, RequestError):  # already counted; the store deletes abandoned uploads
                    await self.store.abandon(self.file)
            if isinstance(error, TimeoutError):
                raise BodyTimeout(f"The file did not arrive within {UPLOAD_S:,.0f} s.") from error
            raise

    async def _receive(self, request: Request) -> None:
        if encoding := encoding_of(request.headers):
            raise UnsupportedMediaType(f"Content-Encoding: {encoding} is not supported for files.")
        declared = request.headers.get("content-length", "")
        expected = int(declared) if declared.isascii() and declared.isdigit() else 0
        if expected > self.max_bytes + MAX_FORM_BYTES:
            raise self._too_large(f"{expected:,} bytes")
        try:
            parser = self.form.parser(_boundary(request))
            async for data in upload_parts(request, "the file"):
                parser.write(data)
                await self._take(expected, least=PIECE_BYTES)
            parser.finalize()
        except FormParserError as error:
            raise InvalidRequest(f"The body is not a valid multipart form: {error}") from error
        if not self.form.is_complete:
            raise InvalidRequest("The multipart form is incomplete: its end boundary is missing.")

    async def _take(self, expected: int, *, least: int) -> None:
        """Store the received bytes of the file while there are at least `least`."""
        waiting = self.form.waiting
        while len(waiting) >= least and waiting:
            piece = bytes(waiting[:PIECE_BYTES])
            del waiting[:PIECE_BYTES]
            self.num_bytes += len(piece)
            if self.num_bytes > self.max_bytes:
                raise self._too_large(f"more than {self.max_bytes:,} bytes")
            if not self.has_begun:
                await answered(self.store.begin(self.file, expected))
                self.has_begun = True
            await answered(self.store.append(self.file, self.num_pieces, piece))
            self.num_pieces += 1

    async def _finish(self) -> StoredFile:
        form = self.form
        if form.filename is None:
            raise InvalidRequest("file: is required, as a part of the form", param="file")
        purpose = form.values.get("purpose")
        if purpose is None:
            raise InvalidRequest("purpose: is required", param="purpose")
        if purpose not in PURPOSES:
            raise InvalidRequest(f"purpose: must be {' or '.join(PURPOSES)}, got {purpose[:80]!r}", param="purpose")
        age_s = _age_s(form.values, self.store.max_age_s)
        await self._take(0, least=1)
        if not self.has_begun:
            raise InvalidRequest("file: must not be empty", param="file")
        named = replace(self.file, filename=form.filename, expires_at=self.file.created_at + age_s)
        return await answered(self.store.complete(named))

    def _too_large(self, size: str) -> BodyTooLarge:
        return BodyTooLarge(
            f"The file ({size}) exceeds this server's limit of {self.max_bytes:,} bytes (--max-file-mib)."
        )


def _boundary(request: Request) -> bytes:
    named = request.headers.get("content-type", "")
    if len(named) > MAX_CONTENT_TYPE_CHARS:
        raise UnsupportedMediaType(
            f"Content-Type has {len(named):,} characters; the limit is {MAX_CONTENT_TYPE_CHARS:,}."
        )
    kind, options = parse_options_header(named)
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        shown = kind.decode("latin-1")[:100]
        raise UnsupportedMediaType(f"The body must be multipart/form-data with a boundary, got {shown!r}.")
    return options[b"boundary"]


def _age_s(values: dict[str, str], most: float) -> float:
    """Return the retention of the file in seconds, from `expires_after`. Raises InvalidRequest."""
    anchor, text = values.get("expires_after[anchor]"), values.get("expires_after[seconds]")
    if anchor is None and text is None:
        return most
    if anchor != "created_at":
        raise InvalidRequest("expires_after.anchor: must be created_at", param="expires_after.anchor")
    seconds = int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 12 else 0
    if not LEAST_RESULT_S <= seconds <= MOST_RESULT_S:
        raise InvalidRequest(
            f"expires_after.seconds: must be a whole number from {LEAST_RESULT_S:,} to {MOST_RESULT_S:,}",
            param="expires_after.seconds",
        )
    return min(most, seconds)


def _clean(name: str) -> str:
    """Sanitise the client's file name, which is shown only to clients."""
    shown = "".join(char for char in name.replace("\\", "/").rpartition("/")[2] if char.isprintable())
    return shown[:MAX_NAME_CHARS] or "file"
