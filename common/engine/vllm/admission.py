"""Admission of the other hosts of a worker: the first messages on each connection between hosts.

    rank host   nonce ─>                     JoinRequest, proof ─>
    worker      nonce ─>                                      JoinResponse, proof ─>

A proof is an HMAC over both nonces, the side and the message. Its key is derived on both ends from the key pair in the
file of --curve-key. Neither end obeys a peer without the key, and recorded messages cannot be replayed. Without
--curve-key, proofs use an empty key. The rest of the connection is not encrypted.
"""

from __future__ import annotations

import hmac
import importlib.metadata
import secrets
from typing import Literal, TypeVar

import msgspec

from common import __version__
from common.config import vllm_version
from common.engine.ranks import Channel
from common.errors import DiptychError, RankLost
from common.wire import read_key_pair

HELLO = b"diptych ranks 1 "
NONCE_BYTES, PROOF_BYTES = 32, 32
MESSAGE_BYTES = 4096
ADMISSION_S = 10.0
"""Timeout per message, in seconds, after which a silent connection is closed."""
KEYS_DIFFER = "its --curve-key differs or is missing on one side: use the same file on every host of the worker"

Purpose = Literal["host", "engine"]
Message = TypeVar("Message", bound=msgspec.Struct)


class NotAdmitted(DiptychError):
    """The peer has a different key, or refuses this host permanently. The message has the values of both sides."""


class Versions(msgspec.Struct, frozen=True):
    """Versions that must match on all hosts, because their ranks compute the same steps."""

    diptych: str
    torch: str
    vllm: str

    @classmethod
    def of_this_host(cls) -> Versions:
        return cls(__version__, importlib.metadata.version("torch"), vllm_version())

    def __str__(self) -> str:
        return f"Diptych {self.diptych} with torch {self.torch} and vLLM {self.vllm or '(none)'}"


class JoinRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Purpose of a connection: a host, or the engine on it, which belongs to the host of `session`."""

    purpose: Purpose
    versions: Versions
    session: bytes = b""


class JoinResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a request. A host gets the `session` of its second connection.

    With a `problem`, the connection is closed. With `again`, the host may retry.
    """

    problem: str = ""
    again: bool = False
    session: bytes = b""


def key_of(curve_key: str) -> bytes:
    """Return the key of proofs, derived from the key pair's file, or b"" for "". Raises ConfigError."""
    if not curve_key:
        return b""
    return hmac.digest(read_key_pair(curve_key).secret, b"the ranks of one worker", "sha256")


class Handshake:
    """One end of the admission protocol. Raises RankLost for silence or a peer that is not a Diptych rank."""

    def __init__(self, channel: Channel, key: bytes, *, leads: bool) -> None:
        """Exchange nonces. `leads` is True on the worker."""
        self._channel, self._key = channel, key
        own = secrets.token_bytes(NONCE_BYTES)
        channel.send(HELLO + own, ADMISSION_S)
        found = channel.receive(ADMISSION_S, MESSAGE_BYTES)
        if not found.startswith(HELLO) or len(found) != len(HELLO) + NONCE_BYTES:
            raise RankLost(f"{channel.peer} does not speak this version of the ranks' protocol")
        other = found[len(HELLO) :]
        self._nonces = own + other if leads else other + own
        self._sides = (b"worker", b"rank host") if leads else (b"rank host", b"worker")

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
