"""Admission of the ranks of other hosts: the first messages on each connection between hosts.

    rank host   nonce ─>                     JoinRequest, proof ─>
    rank 0      nonce ─>                                      JoinResponse, proof ─>

A proof is an HMAC over both nonces, the side and the message. Its key is derived on both ends from the key pair in the
file of --curve-key. Neither end obeys a peer without the key, and recorded messages cannot be replayed. Without
--curve-key, proofs use an empty key. The rest of the connection is not encrypted.
"""

from __future__ import annotations

import hmac
import importlib.metadata
import secrets
from collections.abc import Sequence
from typing import Literal, TypeVar

import msgspec

from common import __version__
from common.config import vllm_version
from common.engine.ranks.channel import Channel
from common.errors import DiptychError, RankLost
from common.wire import read_key_pair

HELLO = b"diptych ranks 1 "
NONCE_BYTES, PROOF_BYTES = 32, 32
MESSAGE_BYTES = 4096
ADMISSION_S = 10.0
"""Timeout per message, in seconds, after which a silent connection is closed."""
KEYS_DIFFER = "its --curve-key differs or is missing on one side: use the same file on every host of the worker"

Purpose = Literal["host", "steps", "adapters", "blocks", "engine"]
Link = tuple[int, Purpose]
"""Rank and purpose of a connection."""
LINKS: tuple[Purpose, ...] = ("steps", "adapters", "blocks")
"""Connections of a rank, in the order of its process's descriptors."""
Message = TypeVar("Message", bound=msgspec.Struct)


class NotAdmitted(DiptychError):
    """The peer has a different key, or refuses this host permanently. The message has the values of both sides."""


class Versions(msgspec.Struct, frozen=True):
    """Versions that must match on all hosts, because ranks repeat each other's steps."""

    diptych: str
    torch: str
    vllm: str = ""

    @classmethod
    def of_this_host(cls) -> Versions:
        return cls(__version__, importlib.metadata.version("torch"), vllm_version())

    def __str__(self) -> str:
        return f"Diptych {self.diptych} with torch {self.torch}" + (f" and vLLM {self.vllm}" if self.vllm else "")


class JoinRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Purpose of a connection: a host, or one of the three connections of a rank assigned to it."""

    purpose: Purpose
    versions: Versions
    session: bytes = b""
    rank: int = 0


class JoinResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a request. A host gets its `ranks`, and the `session` that identifies their connections.

    `engine` is the setting of the worker. With a `problem`, the connection is closed. With `again`, the host may retry.
    """

    problem: str = ""
    again: bool = False
    session: bytes = b""
    ranks: tuple[int, ...] = ()
    engine: str = "diptych"

    @property
    def links(self) -> Sequence[Link]:
        """Connections that the host opens: `LINKS` for each rank, or one for a vLLM that starts its ranks itself."""
        if self.engine == "vllm":
            return ((self.ranks[0], "engine"),)
        return tuple((rank, purpose) for rank in self.ranks for purpose in LINKS)


def key_of(curve_key: str) -> bytes:
    """Return the key of proofs, derived from the key pair's file, or b"" for "". Raises ConfigError."""
    if not curve_key:
        return b""
    return hmac.digest(read_key_pair(curve_key).secret, b"the ranks of one worker", "sha256")


class Handshake:
    """One end of the admission protocol. Raises RankLost for silence or a peer that is not a Diptych rank."""

    def __init__(self, channel: Channel, key: bytes, *, leads: bool) -> None:
        """Exchange nonces. `leads` is True on rank 0."""
        self._channel, self._key = channel, key
        own = secrets.token_bytes(NONCE_BYTES)
        channel.send(HELLO + own, ADMISSION_S)
        found = channel.receive(ADMISSION_S, MESSAGE_BYTES)
        if not found.startswith(HELLO) or len(found) != len(HELLO) + NONCE_BYTES:
            raise RankLost(f"{channel.peer} does not speak this version of the ranks' protocol")
        other = found[len(HELLO) :]
        self._nonces = own + other if leads else other + own
        self._sides = (b"rank 0", b"rank host") if leads else (b"rank host", b"rank 0")

    def send(self, message: msgspec.Struct) -> None:
        body = msgspec.msgpack.encode(message)
        self._channel.send(body + self._proof(self._sides[0], body), ADMISSION_S)

    def receive(self, kind: type[Message]) -> Message:
        """Return the peer's message. Raises NotAdmitted unless it has the same key."""
        found = self._channel.receive(ADMISSION_S, MESSAGE_BYTES)
        body, proof = found[:-PROOF_BYTES], found[-PROOF_BYTES:]
        if not hmac.compare_digest(proof, self._proof(self._sides[1], body)):
            raise NotAdmitted(f"{self._channel.peer} is refused: {KEYS_DIFFER}")
        try:
            return msgspec.msgpack.decode(body, type=kind)
        except msgspec.MsgspecError as error:
            raise RankLost(f"{self._channel.peer} sent an invalid {kind.__name__}: {error}") from error

    def _proof(self, side: bytes, body: bytes) -> bytes:
        return hmac.digest(self._key, b"\0".join((side, self._nonces, body)), "sha256")
