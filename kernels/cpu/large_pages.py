"""Memory in large pages, if available, for weights and KV caches, which every step reads completely.

4 KiB pages are slower to read: each needs its own TLB entry, and hardware prefetching stops at page boundaries.
"""

from __future__ import annotations

import mmap
import threading
from typing import Final

import torch
from torch import Tensor

LARGE_PAGE: Final = 2 * 1024 * 1024
"""Bytes: of x86 and of most ARM kernels."""
CHUNK: Final = 32 * 1024 * 1024
"""Bytes that are mapped at least, so that small weights share large pages."""
LINE: Final = 64
"""Bytes of a cache line, at which each weight begins."""


def prefer_large_pages(pages: mmap.mmap) -> None:
    """Request large pages. Without support for them, the mapping keeps small pages."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            pages.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel that was built without them
            return


class Arena:
    """Hands out pieces of large chunks, each of which is freed when the last of its pieces is."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunk, self._used = torch.empty(0, dtype=torch.uint8), 0

    def take(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes] at a cache line's begin; zero at first."""
        with self._lock:
            begin = -(-self._used // LINE) * LINE
            if begin + num_bytes > self._chunk.numel():
                self._chunk, begin = _map(max(num_bytes, CHUNK)), 0
            self._used = begin + num_bytes
            return self._chunk[begin : self._used]


def _map(num_bytes: int) -> Tensor:
    """Map at least `num_bytes` in whole, aligned large pages."""
    size = -(-num_bytes // LARGE_PAGE) * LARGE_PAGE
    pages = mmap.mmap(-1, size + LARGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    prefer_large_pages(pages)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    begin = -memory.data_ptr() % LARGE_PAGE
    return memory[begin : begin + size]


ARENA: Final = Arena()
