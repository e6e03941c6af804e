"""Maps blocks to slots of a tier and selects blocks to evict. Pure; not thread-safe."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class SlotTable:
    """Evicts the least recently used block that is not being read."""

    def __init__(self, num_slots: int, found: Iterable[tuple[int, int, bytes]] = ()) -> None:
        """`found`: existing blocks as (write number, slot, hash). If a hash occurs twice, the later write wins."""
        self._slot_of: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._num_readers: dict[bytes, int] = {}
        for _, slot, block_hash in sorted(found):
            self._slot_of.pop(block_hash, None)
            self._slot_of[block_hash] = slot
        used = set(self._slot_of.values())
        self._free = [slot for slot in reversed(range(num_slots)) if slot not in used]

    def __len__(self) -> int:
        return len(self._slot_of)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._slot_of

    def hashes(self) -> list[bytes]:
        return list(self._slot_of)

    def num_leading(self, hashes: Sequence[bytes]) -> int:
        """Return how many of the chain's leading blocks are stored."""
        for count, block_hash in enumerate(hashes):
            if block_hash not in self._slot_of:
                return count
        return len(hashes)

    def touch(self, block_hash: bytes) -> None:
        """Mark the block as recently used, if it is stored."""
        if block_hash in self._slot_of:
            self._slot_of.move_to_end(block_hash)

    def allocate(self) -> tuple[int, bytes] | None:
        """Return a slot to write to and the hash of the block evicted from it (b"" if none).

        Returns None if all blocks are being read.
        """
        if self._free:
            return self._free.pop(), b""
        for block_hash in self._slot_of:
            if block_hash not in self._num_readers:
                return self._slot_of.pop(block_hash), block_hash
        return None

    def fill(self, slot: int, block_hash: bytes) -> None:
        """Record that a slot from `allocate` contains the block."""
        self._slot_of[block_hash] = slot

    def release(self, slot: int) -> None:
        """Return an unused slot from `allocate`."""
        self._free.append(slot)

    def begin_read(self, block_hash: bytes) -> int | None:
        """Return the block's slot and protect it until `end_read`; None if the block is not stored."""
        slot = self._slot_of.get(block_hash)
        if slot is not None:
            self._num_readers[block_hash] = self._num_readers.get(block_hash, 0) + 1
            self._slot_of.move_to_end(block_hash)
        return slot

    def end_read(self, block_hash: bytes) -> None:
        left = self._num_readers.pop(block_hash, 1) - 1
        if left:
            self._num_readers[block_hash] = left

    def drop(self, block_hash: bytes) -> int | None:
        """Drop a block and return its slot; None if it was not stored."""
        slot = self._slot_of.pop(block_hash, None)
        if slot is not None:
            self._free.append(slot)
        return slot
