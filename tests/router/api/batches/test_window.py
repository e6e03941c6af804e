"""When the time of a batch is over, while the wall clock runs and while it jumps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from common.machine.wall_clock import AGES_S, WallClock
from router.api.batches import run
from router.api.batches.halt import HaltReason
from router.api.batches.run import BatchRun
from router.stored.records import IN_PROGRESS, StoredBatch

DAY_S = 86_400.0


class Loop:
    """An event loop whose time a test lets pass."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[tuple[float, Callable[[], None]]] = []

    def call_later(self, seconds: float, work: Callable[[], None]) -> None:
        self.timers.append((self.now + seconds, work))

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while due := [timer for timer in self.timers if timer[0] <= until]:
            self.timers.remove(first := min(due, key=lambda timer: timer[0]))
            self.now = first[0]
            first[1]()
        self.now = until


class Batch:
    """A batch of a day that has just begun, and a wall clock that may be `jump` ahead of the loop's."""

    def __init__(self, loop: Loop) -> None:
        self.loop, self.jump = loop, 0.0
        names = ("batch_1", "", IN_PROGRESS, "/v1/completions", "file-1", "out", "err")
        batch = StoredBatch(*names, created_at=0.0, expires_at=DAY_S, result_s=DAY_S)
        self.clock = WallClock(lambda: loop.now + self.jump, lambda: loop.now)
        parts: Any = SimpleNamespace(batches=SimpleNamespace(clock=self.clock))
        nothing: Any = None
        self.work = BatchRun(nothing, parts, nothing, batch)
        self.work._look_at_clock()

    def run(self, seconds: float) -> bool:
        """Let time pass. Whether the batch has expired."""
        self.loop.run(seconds)
        return self.work.halt.reason is HaltReason.EXPIRED


@pytest.fixture
def batch(monkeypatch: pytest.MonkeyPatch) -> Batch:
    loop = Loop()
    monkeypatch.setattr(run, "asyncio", SimpleNamespace(get_running_loop=lambda: loop, Lock=asyncio.Lock))
    return Batch(loop)


def test_it_ends_after_its_window(batch: Batch) -> None:
    assert not batch.run(DAY_S - 1)
    assert batch.run(1) and batch.work.halt.aborts and not batch.loop.timers


def test_a_clock_that_is_ahead_for_a_moment_does_not_end_it(batch: Batch) -> None:
    batch.clock.earliest(AGES_S)
    batch.jump = 31 * DAY_S
    assert not batch.run(AGES_S)
    batch.jump = 0.0
    assert not batch.run(DAY_S - AGES_S - 1)
    assert batch.run(1)


def test_a_clock_that_stays_ahead_does(batch: Batch) -> None:
    batch.clock.earliest(AGES_S)
    batch.jump = 31 * DAY_S
    assert not batch.run(AGES_S)
    assert batch.run(AGES_S)
