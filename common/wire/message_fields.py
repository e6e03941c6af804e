"""Base class of messages, types of fields with their limits, and encoding of prompts."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from common.errors import WireError

PROTOCOL_VERSION = 13
"""Newest version that this process speaks. Peers use the highest version that both speak.

The first change of a message after a release increases it. Each release also speaks the version of the release before,
so that processes can be upgraded one by one:

- A new field is the last of its struct, is marked with `since`, and its default keeps the former behaviour.
  Receivers ignore further fields at the end, and use the default of a missing one.
- A new message, a new value of an existing field or a wider limit is sent only to peers that speak its version. The
  same holds for a field that an older peer must not ignore, such as a sampling parameter: the router must choose a
  worker whose `WorkerHello.protocol` is new enough.
- Removing or moving a field, or changing its meaning or type, takes two releases: add the new form, and remove the old
  one when no supported version needs it.
- The hellos are readable by all versions: they only get new fields.
- KV_LAYOUT_VERSION is independent. A change of it means that old and new workers cannot exchange blocks.
"""
OLDEST_PROTOCOL_VERSION = 12
"""Oldest version that this process speaks."""
UNSTATED_PROTOCOL_VERSION = 12
"""Version of processes whose hellos do not state it."""
MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""Maximum size of a message without blocks: a prompt of four million tokens."""
TOKEN_BYTES = 4
"""Size of a token id, a uint32, in messages, block hashes and arrays."""
MAX_TOKENS = MAX_MESSAGE_BYTES // TOKEN_BYTES
MAX_PRIORITY = 10
"""Maximum absolute value of a priority."""


def since(version: int) -> Meta:
    """Mark a field that was added in this version."""
    return Meta(extra={"since": version})


def common_version(oldest: int, newest: int) -> int:
    """Return the highest version that this process and a peer speak, or 0 if there is none."""
    highest = min(PROTOCOL_VERSION, newest)
    return highest if highest >= max(OLDEST_PROTOCOL_VERSION, oldest) else 0


def version_names(oldest: int, newest: int) -> str:
    """Describe a range of versions: "version 13" or "versions 12 to 13"."""
    return f"version {newest}" if oldest == newest else f"versions {oldest} to {newest}"


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


Protocol = Annotated[int, Meta(ge=0, le=2**31, extra={"since": 13})]
"""Newest protocol version that a process speaks."""


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
