"""Orders work on several devices of one process between two steps of one of them.

    steps     step N ─ mark                            wait ─ step N+1 ─ end of N+1
    others            └──> wait ─ work ─ mark ──────────^

The work runs after all previous steps and before the next one. The end of the next step therefore implies the end of
the work: data read or released after that step is complete. The host does not wait.

Steps of ranks in other processes keep the same order. A rank writes the KV of a step only after its first collective
(the sum of embedded tokens, or the broadcast of sampled ones), which rank 0 joins after the work. Rank 0 ends a step
with a sum that the others join after all their writes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

Work = tuple[torch.device, Callable[[], None]]


class StepOrder:
    """`device` runs the steps. Use only from the thread that launches them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def run(self, work: Sequence[Work]) -> None:
        """Call each piece of work, which launches on its device. On a CPU, the pieces run sequentially."""
        if self._device.type != "cuda":
            for _, launch in work:
                launch()
            return
        steps, ends = self._stream(self._device), []
        before = steps.record_event()
        for device, launch in work:
            stream = steps if device == self._device else self._stream(device)
            if stream is not steps:
                stream.wait_event(before)
            with self._on(stream):
                launch()
            if stream is not steps:
                ends.append(stream.record_event())
        for end in ends:
            steps.wait_event(end)

    def _stream(self, device: torch.device) -> Any:
        """Return the stream on which this thread launches."""
        return torch.cuda.current_stream(device)

    def _on(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)
