"""Times work on a device: replayed graphs between events on a GPU, a clock around calls on the CPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from common.engine.run.recorded_steps import GraphRecorder

Call = Callable[[], object]


class Timer:
    """Medians over `repeats` rounds, after two uncounted ones on a GPU."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.device, self._repeats = device, repeats

    def calls(self, calls: Sequence[Call]) -> float:
        """Seconds of one call; `calls` do the same to different memory, so that no call finds its inputs in the cache.

        On a GPU they are recorded as one graph, which excludes the time of launching.
        """
        if self.device.type != "cuda":
            return self._by_clock(calls)

        def run() -> None:
            for call in calls:
                call()

        # A recorder of its own: the memory of a recording ends with it.
        return self._by_events(GraphRecorder(self.device).record(run)) / len(calls)

    def launched(self, call: Call) -> float:
        """Seconds of one call that cannot be recorded, launching included."""
        return self._by_clock([call]) if self.device.type != "cuda" else self._by_events(call)

    def waited(self, call: Call) -> float:
        """Seconds of one call that waits for its own end, by the clock."""
        return self._by_clock([call])

    def _by_events(self, run: Call) -> float:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(self._repeats + 1)]  # type: ignore[no-untyped-call]
        for _ in range(2):
            run()
        marks[0].record()
        for mark in marks[1:]:
            run()
            mark.record()
        marks[-1].synchronize()
        samples = [float(a.elapsed_time(b)) for a, b in zip(marks, marks[1:], strict=False)]  # ms
        return statistics.median(samples) / 1000

    def _by_clock(self, calls: Sequence[Call]) -> float:
        samples = []
        uncounted = 2 if self.device.type == "cuda" else 0
        for _ in range(self._repeats + uncounted):
            began = time.perf_counter()
            for call in calls:
                call()
            samples.append((time.perf_counter() - began) / len(calls))
        return statistics.median(samples[uncounted:])
