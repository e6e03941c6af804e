"""Who may join a worker's ranks: the first messages on each connection between its hosts.

    rank host   nonce ─>                     Wish, proof ─>
    rank 0      nonce ─>                                      RankAnswer, proof ─>

A proof is an HMAC over both nonces, the side and the message, with a key that both ends derive from the pair in the
file of --curve-key. So neither end takes orders of a stranger, and nothing that was overheard serves twice. Processes
without that file prove nothing. What follows on the connection is plain.
"""

from __future__ import annotations

import hmac
import importlib.metadata
import secrets
from typing import Literal, TypeVar

import msgspec

from common import __version__
from common.engine.ranks.channel import Channel
from common.errors import DiptychError, RankLost
from common.wire import read_key_pair

HELLO = b"diptych ranks 1 "
NONCE_BYTES, PROOF_BYTES = 32, 32
MESSAGE_BYTES = 4096
ADMISSION_S = 10.0
"""How long each end may take for a message, so a connection that says nothing is closed by then."""
KEYS_DIFFER = "its --curve-key is another one, or one side has none: give every host of a worker the same file"

Purpose = Literal["host", "steps", "adapters", "blocks"]
LINKS: tuple[Purpose, ...] = ("steps", "adapters", "blocks")
"""The connections of a rank, in the order in which its process gets them."""
Message = TypeVar("Message", bound=msgspec.Struct)


class NotAdmitted(DiptychError):
    """The other end has another key, or refuses this one for good. The message has the values of both."""


class Versions(msgspec.Struct, frozen=True):
    """What must be the same on every host: ranks repeat each other's steps."""

    diptych: str
    torch: str

    @classmethod
    def of_this_host(cls) -> Versions:
        return cls(__version__, importlib.metadata.version("torch"))


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """What a connection is to be: that of a host, or one of the three of a rank that was given to the host."""

    purpose: Purpose
    versions: Versions
    session: bytes = b""
    rank: int = 0


class RankAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer. A host gets `ranks`, and the `session` to name on their connections.

    With a `problem` the connection is closed; `again`: the same wish may be granted later.
    """

    problem: str = ""
    again: bool = False
    session: bytes = b""
    ranks: tuple[int, ...] = ()


def key_of(curve_key: str) -> bytes:
    """The key of proofs, from the file of a key pair; "" for none. Raises ConfigError."""
    if not curve_key:
        return b""
    return hmac.digest(read_key_pair(curve_key).secret, b"the ranks of one worker", "sha256")


class Handshake:
    """One end of the first messages. Raises RankLost for silence and for what is no rank of Diptych."""

    def __init__(self, channel: Channel, key: bytes, *, leads: bool) -> None:
        """Exchanges nonces; rank 0 `leads`."""
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
        """The other end's message. Raises NotAdmitted unless it has the same key."""
        found = self._channel.receive(ADMISSION_S, MESSAGE_BYTES)
        body, proof = found[:-PROOF_BYTES], found[-PROOF_BYTES:]
        if not hmac.compare_digest(proof, self._proof(self._sides[1], body)):
            raise NotAdmitted(f"{self._channel.peer} is refused: {KEYS_DIFFER}")
        try:
            return msgspec.msgpack.decode(body, type=kind)
        except msgspec.MsgspecError as error:
            raise RankLost(f"{self._channel.peer} sent no {kind.__name__}: {error}") from error

    def _proof(self, side: bytes, body: bytes) -> bytes:
        return hmac.digest(self._key, b"\0".join((side, self._nonces, body)), "sha256")
