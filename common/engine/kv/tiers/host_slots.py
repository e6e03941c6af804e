"""KV blocks in host memory, below a cache in device memory: fixed-size slots, each with a checksum.

The memory is not pinned and is mapped on first use. Blocks are copied through the pinned buffers of `staging.py`.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable

import numpy as np
import xxhash


class HostSlotStore:
    """Slot store in host memory. Its contents end with the worker."""

    found: Iterable[tuple[int, int, bytes]] = ()

    def __init__(self, block_bytes: int, num_slots: int) -> None:
        """Raises OSError if memory is insufficient."""
        self.num_slots, self.block_bytes = num_slots, block_bytes
        self._pages = mmap.mmap(-1, num_slots * block_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._slots = np.frombuffer(self._pages, np.uint8).reshape(num_slots, block_bytes)
        self._held: dict[int, tuple[bytes, int]] = {}  # slot -> hash and xxh3-64 of a complete block

    def write(self, slot: int, block_hash: bytes, block: memoryview) -> None:
        self._held.pop(slot, None)
        np.copyto(self._slots[slot], np.frombuffer(block, np.uint8))
        self._held[slot] = (block_hash, xxhash.xxh3_64_intdigest(self._slots[slot]))

    def read(self, slot: int, block_hash: bytes, into: memoryview) -> bool:
        """Read the block into `into`; False if the slot does not contain it intact."""
        held, seal = self._held.get(slot, (b"", 0))
        if held != block_hash:
            return False
        np.copyto(np.frombuffer(into, np.uint8), self._slots[slot])
        return xxhash.xxh3_64_intdigest(into) == seal

    def clear(self) -> None:
        """Drop all blocks and return their memory to the system."""
        self._held.clear()
        self._pages.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Nothing to close: the memory is freed with its last reference."""
