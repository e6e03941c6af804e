"""Steps in virtual time, several at once: a process each, because each keeps one core busy for minutes."""

from __future__ import annotations

import multiprocessing
import queue
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from types import TracebackType
from typing import Any, Final, Self

from benchmarks.sla.step import Numbers, Settings, Step

LOOK_S: Final = 0.2
_words: Any = None
"""Of a process that measures: the queue of what it tells."""


class SideBySide:
    """Measures steps in at most `num_processes` processes, from its start on; leaving it ends what still runs.

    The steps and their settings must be picklable, functions of steps by their module and name.
    """

    def __init__(self, steps: Mapping[Step, Settings], num_processes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._others = set(multiprocessing.active_children())
        self._words = context.Queue()
        self._pool = ProcessPoolExecutor(num_processes, context, _listened_to, (self._words,))
        self._found: dict[str, Future[tuple[Numbers, float]]] = {
            step.name: self._pool.submit(_measured, step, settings) for step, settings in steps.items()
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            for process in set(multiprocessing.active_children()) - self._others:
                process.terminate()
        self._pool.shutdown(cancel_futures=True)

    def __contains__(self, name: str) -> bool:
        return name in self._found

    def result(self, name: str, tell: Callable[[str], None]) -> tuple[Numbers, float]:
        """The step's numbers, and the seconds that it took; meanwhile tells what all steps tell.

        Raises what the step raised.
        """
        found = self._found[name]
        while not found.done():
            try:
                tell(self._words.get(timeout=LOOK_S))
            except queue.Empty:
                continue
        return found.result()


def _listened_to(words: Any) -> None:
    global _words
    _words = words


def _measured(step: Step, settings: Settings) -> tuple[Numbers, float]:
    began = time.monotonic()
    numbers = step.measure(settings, lambda words: _words.put(f"{step.name}: {words}"))
    return numbers, time.monotonic() - began
