"""Keeps glibc from giving large buffers back to the kernel after every frame.

libzmq allocates memory for each incoming KV frame. Frames are above malloc's default limit for mapped memory, so each
would cost a system call and page faults, about a third of the rate of transfers.
"""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's mallopt."""
MMAP_THRESHOLD_BYTES = 32 * 1024 * 1024  # the largest that glibc accepts
TRIM_THRESHOLD_BYTES = 256 * 1024 * 1024
"""Freed memory at the heap's end that is kept for the next step, not given back and faulted in anew."""


def keep_large_buffers() -> bool:
    """Reuse freed buffers of up to 32 MiB. False if the C library has no such setting."""
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES) and mallopt(M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES))
