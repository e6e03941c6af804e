"""Message encoding: a msgpack array `[tag, field, ...]` followed by its xxh3-64 checksum.

`decode` verifies the checksum, limits sizes while unpacking, validates the type and range of every field, and raises
`WireError` for anything else.

`encode` uses `msgpack`. msgspec would produce the same bytes of a `TokenOutput` with 32 deltas in 3 instead of 14 us,
which is irrelevant per step.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache
from typing import Any, get_args

import msgpack
import msgspec
import xxhash
from msgspec.structs import astuple, fields

from common.errors import WireError
from common.wire.message_fields import MAX_MESSAGE_BYTES, PROTOCOL_VERSION
from common.wire.messages import AnyMessage, Message

CHECKSUM_BYTES = 8
"""Size of the XXH3-64 checksum after each message."""
MAX_MESSAGES_PER_TURN = 64
"""Maximum number of messages that a loop processes before it yields. Awaiting a ready receive does not yield."""

_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: Message, version: int = PROTOCOL_VERSION) -> bytes:
    """Encode a message for a peer whose newest protocol version is `version`."""
    if version >= PROTOCOL_VERSION:
        return seal(_packed(message, astuple))

    def known(struct: msgspec.Struct) -> tuple[Any, ...]:
        kind: Hashable = type(struct)
        return astuple(struct)[: num_fields(kind, version)]

    return seal(_packed(message, known))


def _packed(message: Message, values: Callable[[Any], tuple[Any, ...]]) -> bytes:
    packed: bytes = msgpack.packb(
        (message.__struct_config__.tag, *values(message)),
        default=values,  # structs within a message have no tag
    )
    return packed


@cache
def num_fields(struct: Any, version: int) -> int:
    """Return the number of fields that a type of structs had in `version`. Later fields stand after them."""
    return sum(_added_in(field.type) <= version for field in fields(struct))


def _added_in(annotation: Any) -> int:
    marks = [meta.extra["since"] for meta in get_args(annotation)[1:] if isinstance(meta, msgspec.Meta) and meta.extra]
    return max(marks, default=0)


def seal(packed: bytes) -> bytes:
    """Append the checksum. A flipped bit could otherwise change a token, a request id or a worker."""
    return packed + xxhash.xxh3_64_digest(packed)


def decode(data: bytes | memoryview) -> AnyMessage:
    """Decode a message. Raises WireError for anything that is not exactly one valid message."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise WireError(f"message of {len(data)} bytes exceeds the maximum of {MAX_MESSAGE_BYTES}")
    packed = memoryview(data)[:-CHECKSUM_BYTES]
    if xxhash.xxh3_64_digest(packed) != data[-CHECKSUM_BYTES:]:
        raise WireError(f"invalid message: wrong checksum for its {len(data)} bytes")
    return unpack(packed)


def unpack(packed: bytes | memoryview) -> AnyMessage:
    """Decode a message without a checksum. Raises WireError like `decode`."""
    try:
        # Types and lengths are checked during unpacking, before anything larger than a valid message is allocated.
        return _decoder.decode(packed)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise WireError(f"invalid message: {error}") from error
