"""The CPU: C++ kernels of `kernels/native`, called through ctypes; a wheel's for this CPU, or compiled at first use."""

from __future__ import annotations

from kernels.cpu.large_pages import prefer_large_pages

__all__ = [
    "prefer_large_pages",
]
