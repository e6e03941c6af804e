"""Work on several devices of one process, between two steps of one of them.

    steps     step N ─ mark                            wait ─ step N+1 ─ end of N+1
    others            └──> wait ─ work ─ mark ──────────^

So the work comes behind all that the steps before have done, and the end of the next step is also the end of the work:
what is read or given to others after that step finds it done. The host waits for nothing.

Steps of ranks in other processes come in the same order. A rank writes KV of a step behind its first sum (of embedded
tokens, or the broadcast of sampled ones), to which rank 0 comes behind the work. Rank 0 ends a step with a sum to which
the others come behind all that they wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

Work = tuple[torch.device, Callable[[], None]]


class StepOrder:
    """`device` is that of the steps. Used by the thread that launches them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def run(self, work: Sequence[Work]) -> None:
        """Call each piece, which launches on its device. On a CPU, where it has ended then, they follow each other."""
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
        """The one that this thread launches on."""
        return torch.cuda.current_stream(device)

    def _on(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)
