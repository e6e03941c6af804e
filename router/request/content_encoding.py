"""Decodes compressed bodies. The decoded size is checked during decoding, against decompression bombs."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterable, AsyncIterator

from starlette.datastructures import Headers

from common.errors import InvalidRequest
from router.request.errors import BodyTooLarge, UnsupportedMediaType

ACCEPTED = "gzip, deflate"
FIRST_BYTES, DECODED_BYTES = 64 * 1024, 256 * 1024
"""Bytes to decode at a time. The first piece of a part of at most this size is decoded on the event loop, in 0.1 ms,
all others in a thread."""


def encoding_of(headers: Headers) -> str:
    """Return the content encoding of a body: gzip, deflate, or "" for none. Raises UnsupportedMediaType."""
    named = ",".join(headers.getlist("content-encoding")).strip().lower().removeprefix("x-")
    if named in ("", "identity"):
        return ""
    if named not in ("gzip", "deflate"):
        raise UnsupportedMediaType(f"Content-Encoding: {named[:100]!r} is not supported (expected one of {ACCEPTED})")
    return named


async def decoded(parts: AsyncIterable[bytes], encoding: str, max_bytes: int) -> AsyncIterator[bytes]:
    """Decode the body in pieces of at most DECODED_BYTES. The encoded `parts` may have `max_bytes` in total.

    Raises InvalidRequest for data that is invalid or incomplete, and BodyTooLarge.
    """
    decoder, head, size = None, b"", 0
    try:
        async for part in parts:
            size += len(part)
            if size > max_bytes:
                raise BodyTooLarge(f"the encoded body has more than {max_bytes:,} bytes, the maximum")
            if decoder is None:
                part = head = head + part
                if len(head) < 2:
                    continue
                decoder = zlib.decompressobj(_window(head, encoding))
            is_first = len(part) <= FIRST_BYTES
            while part:
                if decoder.eof:
                    raise InvalidRequest(f"bytes follow the {encoding} data of the body")
                if is_first:
                    yield decoder.decompress(part, FIRST_BYTES)
                else:
                    yield await asyncio.to_thread(decoder.decompress, part, DECODED_BYTES)
                part, is_first = decoder.unconsumed_tail or decoder.unused_data, False
        while decoder is None or not decoder.eof:  # the decoder may still hold decoded data
            rest = b"" if decoder is None else decoder.decompress(b"", FIRST_BYTES)
            if not rest:
                raise InvalidRequest(f"the {encoding} data of the body is incomplete")
            yield rest
    except zlib.error as error:
        raise InvalidRequest(f"the body is not valid {encoding} data ({error})") from error


def _window(head: bytes, encoding: str) -> int:
    """Return zlib's `wbits`. Some clients send deflate data without the zlib header that RFC 9110 requires."""
    if encoding == "gzip":
        return 16 + zlib.MAX_WBITS
    has_header = head[0] & 0x0F == 8 and int.from_bytes(head[:2], "big") % 31 == 0
    return zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS
