"""The state of one incoming KV transfer: which blocks are reserved for it and which have arrived. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from common.kv.shared_memory import PeerMemory
from common.wire.messages import KVDone


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
    memory: PeerMemory | None = None
    token: int = 0
    quantised: bool = False
    released: bool = False
    num_bytes: int = 0
    arrivals: list[tuple[float, int]] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, int]:
        return (self.request_id, self.attempt)

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
