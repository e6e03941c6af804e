"""All memory of the host that this process has pinned: counted, and allocated when a worker starts.

Pinning is a call of the driver that all launches wait for, and freeing pinned memory spoils a recording, so neither may
happen during a step. What steps copy passes through a ring (`pinned_ring.py`); long-lived buffers are allocated here.
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
"""Of a process that does not say what its steps copy: a benchmark, or a test."""


def granted(num_bytes: int) -> int:
    """What torch pins for so many bytes: a power of two."""
    return 1 << max(0, num_bytes - 1).bit_length()


class PinnedMemory:
    """That of one process, for all its devices. Any thread may use it."""

    def __init__(self) -> None:
        self._held: dict[int, int] = {}
        self._keys = itertools.count()
        self._ring: PinnedRing | None = None
        self._lock = threading.Lock()  # of `_ring`

    @property
    def num_bytes(self) -> int:
        """Of all that is pinned and in use. What was given back torch keeps, and gives out again."""
        return sum(list(self._held.values()))

    def allocate(self, num_bytes: int) -> np.ndarray:
        """uint8 [num_bytes], counted until nothing refers to this array, slices of it included."""
        memory = torch.empty(max(1, num_bytes), dtype=torch.uint8, pin_memory=True).numpy()
        key = self.add(granted(len(memory)))
        weakref.finalize(memory, self.remove, key).atexit = False
        return memory[:num_bytes]

    def add(self, num_bytes: int) -> int:
        """Counts memory that was pinned otherwise, until `remove` of the number that this returns."""
        key = next(self._keys)
        self._held[key] = num_bytes
        return key

    def remove(self, key: int) -> None:
        """Without a lock: it may run whenever Python collects garbage."""
        self._held.pop(key, None)

    def reserve_ring(self, num_bytes: int) -> None:
        """At a worker's start, and after no failure of the device: steps copy through so many bytes."""
        with self._lock:
            if self._ring is not None and self._ring.num_bytes >= num_bytes:
                return
            if self._ring is not None:
                self._ring.drain()
            self._ring = self._new_ring(num_bytes)

    @property
    def ring(self) -> PinnedRing:
        """For what steps copy."""
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
