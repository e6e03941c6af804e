"""The state of one incoming KV transfer: which blocks are reserved for it and which have arrived. Pure.

And the events that the receiver's thread tells the engine of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from common.engine.kv import ImportedMemory, PeerMemory
from common.engine.transfer.remote_memory import RemoteMemory
from common.wire.messages import KVDone, KVOpen

SenderMemory = PeerMemory | ImportedMemory | RemoteMemory
"""Memory of a sender that its receiver copies blocks out of: mapped by it or its GPU, or read over a network."""


@dataclass(slots=True, eq=False)
class IncomingTransfer:
    """The prompt's blocks from `first_block` on are to come into `blocks[first_block ..]`; those before have their KV.

    A block is received once its frame arrived, or it was copied from `memory`, and its checksum matched. A second frame
    for it is ignored. `memory` is the prefill worker's, if this worker can read it. In a hand-over `blocks` has room
    for more blocks than come in the end, as `done` says. Frames must carry the secret `token`. They hold 8-bit numbers
    if the transfer is `quantised`. Once it is `released` no further block is written. `num_bytes` arrived or were
    copied; `arrivals` has when each message was read, and its bytes. Times are engine clock, in seconds.
    """

    request_id: str
    attempt: int
    peer: bytes
    blocks: Sequence[int]
    first_block: int
    granted_at: float
    last_progress: float
    received: set[int] = field(default_factory=set)
    done: KVDone | None = None
    done_at: float = 0.0
    last_block_at: float = 0.0
    busy_s: float = 0.0
    memory: SenderMemory | None = None
    token: int = 0
    quantised: bool = False
    released: bool = False
    num_bytes: int = 0
    arrivals: list[tuple[float, int]] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, int]:
        return (self.request_id, self.attempt)

    @property
    def transport(self) -> str:
        """How blocks come: tcp, shm, nixl or cuda-ipc."""
        match self.memory:
            case None:
                return "tcp"
            case PeerMemory():
                return "shm"
            case ImportedMemory():
                return "cuda-ipc"
            case RemoteMemory():
                return "nixl"

    @property
    def num_blocks(self) -> int:
        """Blocks of the whole prompt: in a hand-over an upper bound until `done`."""
        return self.done.num_blocks if self.done and self.done.num_blocks else len(self.blocks)

    @property
    def num_missing(self) -> int:
        return max(0, self.num_blocks - self.first_block) - len(self.received)

    @property
    def complete(self) -> bool:
        return self.done is not None and self.num_missing == 0

    @property
    def num_prefix_received(self) -> int:
        """Blocks from the start of the prompt that have their KV, without a gap."""
        index = self.first_block
        while index in self.received:
            index += 1
        return index

    def bytes_since(self, at: float) -> int:
        """Bytes that arrived after this time."""
        return sum(num_bytes for arrived_at, num_bytes in self.arrivals if arrived_at > at)

    def wants(self, index: int) -> bool:
        """Whether a frame for block `index` may be written."""
        is_lent = self.first_block <= index < len(self.blocks) and not self.released
        return is_lent and index not in self.received


@dataclass(frozen=True, slots=True)
class TransferOpened:
    """A prefill worker announced KV. Answers go to `peer`; `received_at` is by this worker's clock.

    `memory` is the prefill worker's, if this worker can read it.
    """

    peer: bytes
    message: KVOpen
    received_at: float
    memory: SenderMemory | None = None


@dataclass(frozen=True, slots=True)
class TransferCompleted:
    """Every block has arrived and is verified, and the prefill worker's hold has ended."""

    transfer: IncomingTransfer


@dataclass(frozen=True, slots=True)
class TransferFailed:
    """The transfer is over. `by_peer`: `peer` says that it gave up. The transfer may be another peer's.

    `phase` is that in which the peer's request failed for good, or "".
    """

    request_id: str
    attempt: int
    reason: str
    by_peer: bool
    peer: bytes = b""
    phase: str = ""
