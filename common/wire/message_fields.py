"""The base of all messages, the types of their fields, each with its bounds, and prompts as they travel."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from common.errors import WireError

PROTOCOL_VERSION = 12
"""Raised with every change of a message: a worker takes no router of another version."""
MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""Of one message without blocks: a prompt of four million tokens."""
TOKEN_BYTES = 4
"""A token id is a uint32 in messages, in block hashes and in arrays."""
MAX_TOKENS = MAX_MESSAGE_BYTES // TOKEN_BYTES
MAX_PRIORITY = 10
"""Levels to either side of 0."""

Role = Literal["prefill", "decode"]
"""Of a worker. `WorkerHello.role` is any text, so that a router can name a worker of unknown role in its log."""
ROLES: tuple[Role, ...] = ("prefill", "decode")
Name = Annotated[str, Meta(min_length=1, max_length=256)]
Text = Annotated[str, Meta(max_length=4096)]
COUNT_BITS = 62
"""Of the largest `Count`, and so of the secrets that travel as one."""
Count = Annotated[int, Meta(ge=0, le=2**COUNT_BITS)]
Seconds = Annotated[float, Meta(ge=0.0, le=1e9)]
"""A duration or the reading of a monotonic clock. Infinity and NaN would spread through every sum."""
Priority = Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]
"""Of a request: the higher, the sooner its turn."""
Finite = Annotated[float, Meta(ge=-1e15, le=1e15)]
Reason = Annotated[str, Meta(pattern=r"^(|stop|length|abort|moved)\Z")]
TokenBytes = Annotated[bytes, Meta(max_length=4 * MAX_TOKENS)]
Address = Annotated[str, Meta(max_length=256, pattern=r"^tcp://\S+\Z")]
"""Never `inproc` or `ipc`: a router must not have a worker connect to itself, or to a file."""

AddressOrNone = Annotated[str, Meta(max_length=256, pattern=r"^(|tcp://\S+)\Z")]
"""The same, or "". One that others are told is checked where it is said: it would spoil the message to them."""


class Message(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Base of all messages: immutable, positional on the wire, tagged by number."""


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian uint32, the form in which prompts travel."""
    return array("I", token_ids).tobytes()


def unpack_tokens(data: bytes) -> list[int]:
    """Inverse of `pack_tokens`. Raises WireError when the length is not a multiple of four."""
    if len(data) % TOKEN_BYTES:
        raise WireError(f"packed tokens have {len(data)} bytes, not a multiple of {TOKEN_BYTES}")
    return array("I", data).tolist()
