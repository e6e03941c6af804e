"""Computes the masks of slow grammars on a thread, so that no step waits for them.

The grammar library releases the GIL while it computes a mask.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import PriorityQueue

from common.grammar.grammar import Constraint


@dataclass(frozen=True, slots=True, order=True)
class _Job:
    """A request for one mask. Ordered by the processor time that the answer has used, then by age."""

    spent_s: float
    number: int
    constraint: Constraint | None = field(compare=False)
    output_token_ids: Sequence[int] = field(compare=False)
    on_ready: Callable[[], None] = field(compare=False)


class MaskThread:
    """A thread that starts with its first job. `submit` and `close` are thread-safe."""

    def __init__(self) -> None:
        self._jobs: PriorityQueue[_Job] = PriorityQueue()
        self._numbers, self._lock = itertools.count(), threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, constraint: Constraint, output_token_ids: Sequence[int], on_ready: Callable[[], None]) -> None:
        """Queue the mask that follows `output_token_ids`. The thread then calls `on_ready`, which must not raise."""
        with self._lock:
            if self._closed:
                return
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="masks", daemon=True)
                self._thread.start()
            self._jobs.put(_Job(constraint.spent_s, next(self._numbers), constraint, output_token_ids, on_ready))

    def close(self) -> None:
        """End the thread after its current mask, and drop all queued jobs."""
        with self._lock:
            self._closed = True
            thread = self._thread
            self._jobs.put(_Job(-1.0, next(self._numbers), None, (), lambda: None))
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()).constraint is not None:
            job.constraint.allowed(job.output_token_ids)
            job.on_ready()
