"""One kernel at one size, to check and to time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.gpu.chip import Chip
from benchmarks.gpu.gate import poisoned
from benchmarks.gpu.timer import Call, Timer


@dataclass(frozen=True, slots=True)
class KernelCase:
    """`calls` do the same to different memory. Each moves at least `num_bytes` and does at least `num_flops`.

    `check` runs the kernel and returns its error, or "". `peers` are other libraries' kernels for the same work; making
    their calls may raise, when one is not installed or does not support these sizes.
    """

    name: str
    size: str
    num_bytes: float
    num_flops: float
    calls: Sequence[Call]
    check: Callable[[], str]
    peers: Mapping[str, Callable[[], Sequence[Call]]] = field(default_factory=dict)

    def problem(self) -> str:
        """The kernel's error, or ""."""
        with poisoned():
            return self.check()

    def measure(self, chip: Chip, timer: Timer) -> dict[str, Any]:
        """Time the kernel and its peers in us, and compare with the floor."""
        seconds, floor = timer.calls(self.calls), chip.floor(self.num_bytes, self.num_flops)
        row: dict[str, Any] = {
            "kernel": self.name,
            "size": self.size,
            "us": round(seconds * 1e6, 2),
            "floor_us": round(floor * 1e6, 2),
            "of_floor": round(floor / seconds, 4),
            "bound": "bytes" if self.num_bytes / chip.copy_rate >= self.num_flops / chip.matmul_rate else "flops",
            "gb_per_s": round(self.num_bytes / seconds / 1e9, 1),
            "tflop_per_s": round(self.num_flops / seconds / 1e12, 2),
            "peers_us": {},
        }
        for name, make in self.peers.items():
            row["peers_us"][name] = self._peer(make, timer)
        return row

    @staticmethod
    def _peer(make: Callable[[], Sequence[Call]], timer: Timer) -> float | str:
        """Microseconds, or the error: a peer that fails must not end the measurement."""
        try:
            return round(timer.calls(make()) * 1e6, 2)
        except Exception as error:
            return words_of(error)


MakeCase = Callable[[], KernelCase]
"""Allocates a case's inputs, which are freed with it."""


def name_of(case: KernelCase) -> str:
    """The name of a check."""
    return f"{case.name}, {case.size}"


def words_of(error: BaseException) -> str:
    """An error in one line: its first line and its last, in which compilers name the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    shown = [line[:100] for line in dict.fromkeys((lines[0], lines[-1]))]
    return f"{type(error).__name__}: {' ... '.join(shown)}"
