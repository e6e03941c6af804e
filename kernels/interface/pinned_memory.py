"""Pinned host memory of this process: accounting, and allocation at worker start.

All launches wait while the driver pins memory, and freeing pinned memory breaks a graph capture, so neither may happen
during a step. Copies of a step use a ring (`pinned_ring.py`). Long-lived buffers are allocated here.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import Any

import numpy as np
import torch

from kernels.interface.pinned_ring import Mark, PinnedRing

LEAST_RING_BYTES = 2**20
"""Ring size of a process that does not reserve one, such as a benchmark or a test."""


def granted(num_bytes: int) -> int:
    """Return the bytes that torch pins for an allocation of `num_bytes`: the next power of two."""
    return 1 << max(0, num_bytes - 1).bit_length()


class PinnedMemory:
    """Pinned memory of one process, shared by all its devices. Thread-safe."""

    def __init__(self) -> None:
        self._held: dict[int, int] = {}
        self._keys = itertools.count()
        self._ring: PinnedRing | None = None
        self._lock = threading.Lock()  # of `_ring`

    @property
    def num_bytes(self) -> int:
        """Bytes pinned and in use. Torch caches released memory for reuse; it is not included."""
        return sum(list(self._held.values()))

    def allocate(self, num_bytes: int) -> np.ndarray:
        """Allocate uint8 [num_bytes], counted until this array and all slices of it are dropped."""
        memory = torch.empty(max(1, num_bytes), dtype=torch.uint8, pin_memory=True).numpy()
        key = self.add(granted(len(memory)))
        weakref.finalize(memory, self.remove, key).atexit = False
        return memory[:num_bytes]

    def add(self, num_bytes: int) -> int:
        """Count memory that was pinned elsewhere. Returns a key for `remove`."""
        key = next(self._keys)
        self._held[key] = num_bytes
        return key

    def remove(self, key: int) -> None:
        """Stop counting memory. Takes no lock, because it may run during garbage collection."""
        self._held.pop(key, None)

    def reserve_ring(self, num_bytes: int) -> None:
        """Reserve a ring of at least `num_bytes` for copies. Call at worker start, and not after a device failure."""
        with self._lock:
            if self._ring is not None and self._ring.num_bytes >= num_bytes:
                return
            if self._ring is not None:
                self._ring.drain()
            self._ring = self._new_ring(num_bytes)

    @property
    def ring(self) -> PinnedRing:
        """Ring for the copies of steps."""
        if (ring := self._ring) is None:
            self.reserve_ring(LEAST_RING_BYTES)
            ring = self._ring
            assert ring is not None
        return ring

    def _new_ring(self, num_bytes: int) -> PinnedRing:
        return PinnedRing(self.allocate(granted(num_bytes)), self.allocate, _mark)


def _mark(device: torch.device) -> Mark:
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    mark: Mark = event
    return mark


_PINNED = PinnedMemory()


def pinned() -> PinnedMemory:
    """The pinned memory of this process."""
    return _PINNED
