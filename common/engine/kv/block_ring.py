"""Ring of shared-memory slots through which blocks pass to workers of the same host.

A cache that other processes cannot map (a GPU's, another engine's, or one split across ranks) uses a ring. The owner
copies a block into a slot. The receiver copies it out and acknowledges.

    free ──put: filled and lent to a transfer──> lent ──KVTaken, or the end of the transfer──> free
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from common.engine.kv.copy_stream import RegistrationError
from common.engine.kv.shared_memory import KVMemory, SharedMemory, SharedMemoryError
from common.engine.kv.staging import RingSource
from common.errors import BlockError

RING_BYTES = 128 * 2**20
"""Size of a ring: enough for several messages to several receivers."""
MIN_SLOTS = 8
"""Minimum number of slots, however large a block is, so that copies in and out overlap."""

Key = tuple[str, int]  # request_id and attempt of a transfer


@dataclass(slots=True)
class _Loan:
    """Slots lent to a transfer, and the address of its receiver."""

    receiver: str
    places: set[int] = field(default_factory=set)


class BlockRing:
    """Writer side of the ring, used only by the sender's thread. Each slot is free or lent to one transfer."""

    def __init__(self, blocks: RingSource, num_slots: int) -> None:
        """Raises SharedMemoryError if shared memory is unavailable or the device cannot access it."""
        self.block_bytes, self.num_slots = blocks.block_bytes, num_slots
        self._blocks = blocks
        try:
            self._memory = SharedMemory(num_slots * self.block_bytes, is_ring=True, slot_bytes=self.block_bytes)
        except OSError as error:
            raise SharedMemoryError(
                f"no memory for {num_slots} slots of {self.block_bytes:,} bytes: {error}"
            ) from error
        num_bytes = num_slots * self.block_bytes
        with torch.inference_mode(False):  # otherwise a sender thread outside inference mode may not write to it
            self._flat = torch.frombuffer(self._memory.pages, dtype=torch.uint8, count=num_bytes)
        try:
            blocks.stream.register(self._flat)
        except RegistrationError as error:
            raise SharedMemoryError(str(error)) from error
        self._places = list(self._flat.view(num_slots, self.block_bytes))
        self._free = deque(range(num_slots))  # least recently freed first, which gives a slow reader the most time
        self._loans: dict[Key, _Loan] = {}

    @property
    def offer(self) -> KVMemory:
        return self._memory.offer

    @property
    def region(self) -> tuple[int, int]:
        """Address and size in bytes of the slots."""
        return self._flat.data_ptr(), self._flat.nbytes

    @property
    def num_free(self) -> int:
        return len(self._free)

    def num_bytes(self, blocks: Sequence[int]) -> int:
        """Return the size of these blocks."""
        return sum(map(self._blocks.num_bytes, blocks))

    def put(self, key: Key, receiver: str, blocks: Sequence[int]) -> tuple[list[int], list[int]]:
        """Copy blocks, in order, until no slot is free, and lend the slots to transfer `key`.

        Returns the slots used and a checksum of the bytes in each.
        """
        loan = self._loans.setdefault(key, _Loan(receiver))
        places = [self._free.popleft() for _ in range(min(len(blocks), len(self._free)))]
        loan.places.update(places)
        copies = [(block, self._places[place]) for block, place in zip(blocks, places, strict=False)]
        return places, self._blocks.copy_all(copies) if copies else []

    def release(self, key: Key, places: Sequence[int]) -> bool:
        """Release slots of the transfer. Returns False and frees nothing unless the transfer holds all of them."""
        loan = self._loans.get(key)
        if loan is None or not loan.places.issuperset(places):
            return False
        self._free.extend(set(places))
        loan.places.difference_update(places)
        return True

    def end(self, key: Key) -> None:
        """End the transfer and free all its slots."""
        if (loan := self._loans.pop(key, None)) is not None:
            self._free.extend(loan.places)

    def holds_slots(self, receiver: str) -> bool:
        """Return whether transfers to this address hold slots, so that some will be released."""
        return any(loan.places for loan in self._loans.values() if loan.receiver == receiver)

    def check_integrity(self) -> None:
        """Raise BlockError unless every slot is free or lent to one transfer."""
        lent = [place for loan in self._loans.values() for place in loan.places]
        if sorted([*self._free, *lent]) != list(range(self.num_slots)):
            raise BlockError(f"{len(self._free)} free and {len(lent)} lent slots of {self.num_slots}")

    def close(self) -> None:
        """Unmap the memory. No `put` may follow. Receivers keep their mappings until they have copied."""
        self._blocks.stream.unregister(self._flat)
        self._places.clear()
        del self._flat, self._memory


def ring_for(blocks: RingSource, num_blocks: int) -> BlockRing:
    """Create a ring of the default size for a cache of `num_blocks`. Raises SharedMemoryError."""
    return BlockRing(blocks, min(num_blocks, max(MIN_SLOTS, RING_BYTES // blocks.block_bytes)))
