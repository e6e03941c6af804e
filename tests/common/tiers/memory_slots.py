"""Slots in memory, for tiers of tests."""

from __future__ import annotations

import mmap
from collections.abc import Iterable

import numpy as np


class MemorySlots:
    """A tier's store that a test can look into."""

    def __init__(self, block_bytes: int, num_slots: int) -> None:
        """Raises OSError when there is no such room."""
        self.num_slots, self.block_bytes = num_slots, block_bytes
        self._pages = mmap.mmap(-1, num_slots * block_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._slots = np.frombuffer(self._pages, np.uint8).reshape(num_slots, block_bytes)
        self._hash_of: dict[int, bytes] = {}

    @property
    def found(self) -> Iterable[tuple[int, int, bytes]]:
        return ()

    def write(self, slot: int, block_hash: bytes, block: memoryview) -> None:
        self._hash_of.pop(slot, None)
        np.copyto(self._slots[slot], np.frombuffer(block, np.uint8))
        self._hash_of[slot] = block_hash

    def read(self, slot: int, block_hash: bytes, into: memoryview) -> bool:
        if self._hash_of.get(slot) != block_hash:
            return False
        np.copyto(np.frombuffer(into, np.uint8), self._slots[slot])
        return True

    def clear(self) -> None:
        self._hash_of.clear()

    def close(self) -> None:
        """The system takes the memory back with its last reference."""
