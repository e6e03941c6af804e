"""Sends block numbers instead of blocks: receivers read the cache, or a ring of slots.

Base class of the shared-memory and NIXL transports, which differ in their offers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from common.engine.transfer.transports.interface import OutgoingEnd, PreparedBlocks

if TYPE_CHECKING:
    from common.engine.kv import BlockRing
    from common.engine.transfer.sender import OutgoingTransfer
    from common.engine.transfer.transports.tcp import Frames


class NumberedBlocks(OutgoingEnd):
    """With a `ring`, blocks are copied to slots lent to their transfer. Without, receivers read the cache."""

    def __init__(self, frames: Frames, ring: BlockRing | None, *, is_required: bool = False) -> None:
        super().__init__(frames)
        self.ring, self.is_required = ring, is_required

    def ship(self, transfer: OutgoingTransfer, indices: range) -> PreparedBlocks | None:
        """Fall back to frames if other receivers hold all slots and this one holds none."""
        blocks = [transfer.blocks[index] for index in indices]
        if self.ring is None:
            views = self.frames.read(blocks)
            return PreparedBlocks(indices, sum(map(len, views)), views, blocks)
        receiver = transfer.target.address
        places, checksums = self.ring.put(transfer.key, receiver, blocks)
        if places:
            size = self.ring.num_bytes(blocks[: len(places)])
            return PreparedBlocks(indices[: len(places)], size, (), places, checksums)
        if self.is_required or self.ring.holds_slots(receiver):
            return None
        return self.frames.ship(transfer, indices)

    def undo(self, transfer: OutgoingTransfer, prepared: PreparedBlocks) -> None:
        if self.ring is not None and prepared.checksums:
            self.ring.release(transfer.key, prepared.sources)

    def taken(self, transfer: OutgoingTransfer, places: Sequence[int]) -> bool:
        return self.ring is None or self.ring.release(transfer.key, places)

    def end(self, transfer: OutgoingTransfer) -> None:
        if self.ring is not None:
            self.ring.end(transfer.key)

    def close(self) -> None:
        if self.ring is not None:
            self.ring.close()
