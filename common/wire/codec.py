"""Message encoding: a msgpack array `[tag, field, ...]` followed by its xxh3-64 checksum.

`decode` verifies the checksum, limits sizes while unpacking, validates the type and range of every field, and raises
`WireError` for anything else.

`encode` uses `msgpack`. msgspec would produce the same bytes of a `TokenOutput` with 32 deltas in 3 instead of 14 us,
which is irrelevant per step.
"""

from __future__ import annotations

import msgpack
import msgspec
import xxhash
from msgspec.structs import astuple

from common.errors import WireError
from common.wire.message_fields import MAX_MESSAGE_BYTES
from common.wire.messages import AnyMessage, Message

CHECKSUM_BYTES = 8
"""Size of the XXH3-64 checksum after each message."""
MAX_MESSAGES_PER_TURN = 64
"""Maximum number of messages that a loop processes before it yields. Awaiting a ready receive does not yield."""

_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: Message) -> bytes:
    """Encode a message."""
    fields = (message.__struct_config__.tag, *astuple(message))
    packed: bytes = msgpack.packb(fields, default=astuple)  # structs within a message have no tag
    return seal(packed)


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
