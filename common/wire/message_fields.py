"""Base class of messages, types of fields with their limits, and encoding of prompts."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from common.errors import WireError

PROTOCOL_VERSION = 12
"""Increased with every change of a message. Workers reject routers of another version."""
MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""Maximum size of a message without blocks: a prompt of four million tokens."""
TOKEN_BYTES = 4
"""Size of a token id, a uint32, in messages, block hashes and arrays."""
MAX_TOKENS = MAX_MESSAGE_BYTES // TOKEN_BYTES
MAX_PRIORITY = 10
"""Maximum absolute value of a priority."""

Role = Literal["prefill", "decode"]
"""Role of a worker. `WorkerHello.role` is any text, so that a router can log unknown roles."""
ROLES: tuple[Role, ...] = ("prefill", "decode")
Name = Annotated[str, Meta(min_length=1, max_length=256)]
Text = Annotated[str, Meta(max_length=4096)]
COUNT_BITS = 62
"""Size of the largest `Count`, and of secrets sent as one."""
Count = Annotated[int, Meta(ge=0, le=2**COUNT_BITS)]
Seconds = Annotated[float, Meta(ge=0.0, le=1e9)]
"""A duration or monotonic time. Infinity and NaN would spread through sums."""
Priority = Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]
"""Priority of a request. Higher values are served first."""
Finite = Annotated[float, Meta(ge=-1e15, le=1e15)]
Reason = Annotated[str, Meta(pattern=r"^(|stop|length|abort|moved)\Z")]
TokenBytes = Annotated[bytes, Meta(max_length=4 * MAX_TOKENS)]
Address = Annotated[str, Meta(max_length=256, pattern=r"^tcp://\S+\Z")]
"""Not `inproc` or `ipc`: a router must not make a worker connect to itself or to a file."""

AddressOrNone = Annotated[str, Meta(max_length=256, pattern=r"^(|tcp://\S+)\Z")]
"""An address or "". Forwarded addresses are checked at the sender, as an invalid one would invalidate the message."""


class Message(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Base of all messages: immutable, positional, tagged by number."""


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Encode token ids as little-endian uint32, as in messages."""
    return array("I", token_ids).tobytes()


def unpack_tokens(data: bytes) -> list[int]:
    """Inverse of `pack_tokens`. Raises WireError when the length is not a multiple of four."""
    if len(data) % TOKEN_BYTES:
        raise WireError(f"packed tokens have {len(data)} bytes, not a multiple of {TOKEN_BYTES}")
    return array("I", data).tolist()
