"""Which block is in which slot of a tier, and which one makes room for the next. Pure; its owner locks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class SlotTable:
    """The block that was used longest ago makes room, unless it is being read."""

    def __init__(self, num_slots: int, found: Iterable[tuple[int, int, bytes]] = ()) -> None:
        """`found` are blocks that are there already: (number of writing, slot, hash). Of two with one hash the later
        one counts."""
        self._slot_of: OrderedDict[bytes, int] = OrderedDict()  # used longest ago first
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
        """How many of the chain's first blocks are here."""
        for count, block_hash in enumerate(hashes):
            if block_hash not in self._slot_of:
                return count
        return len(hashes)

    def touch(self, block_hash: bytes) -> None:
        """Note that the block was used, if it is here."""
        if block_hash in self._slot_of:
            self._slot_of.move_to_end(block_hash)

    def make_room(self) -> tuple[int, bytes] | None:
        """A slot to write to, and the hash of the block that it held, b"" if none; None while all are being read."""
        if self._free:
            return self._free.pop(), b""
        for block_hash in self._slot_of:
            if block_hash not in self._num_readers:
                return self._slot_of.pop(block_hash), block_hash
        return None

    def fill(self, slot: int, block_hash: bytes) -> None:
        """The block is whole in a slot that `make_room` gave."""
        self._slot_of[block_hash] = slot

    def give_back(self, slot: int) -> None:
        """Nothing was written to a slot that `make_room` gave."""
        self._free.append(slot)

    def begin_read(self, block_hash: bytes) -> int | None:
        """The block's slot, which keeps it until `end_read`; None if it is not here."""
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
        """Forget a block; the slot that it had."""
        slot = self._slot_of.pop(block_hash, None)
        if slot is not None:
            self._free.append(slot)
        return slot
