"""The engine's loop: a probe from outside sees that it turns, or that it hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from common.engine.kv.block_pool import BlockCounts
from common.engine.worker.contract import EngineStatus
from common.engine.worker.loop import INBOX_BOUND, EngineLoop
from common.engine.worker.step_times import LONGEST_S, StepTimes
from common.errors import RankLost
from common.latency.step_model import StepShape

from ....waiting import wait_until


class SleepyEngine(EngineLoop):
    """Each command is a step, which lasts until the test lets it go. `num_seen` is what the status says before it."""

    def __init__(self) -> None:
        super().__init__(lambda messages: None)
        self.work: list[object] = []
        self.go = threading.Event()
        self.in_step = threading.Event()
        self.num_done = 0
        self.told: list[bool] = []

    has_work = property(lambda self: bool(self.work))  # type: ignore[assignment]
    is_empty = property(lambda self: not self.work)  # type: ignore[assignment]

    def apply(self, command: object) -> None:
        self.work.append(command)

    def step(self, now: float) -> None:
        shape = StepShape.of_prompt(0, 128)
        self.planned(shape)
        self.in_step.set()
        assert self.go.wait(100)
        self.took(shape, time.monotonic() - now)
        self.num_done += len(self.work)
        self.work.clear()

    def expire(self, now: float) -> None:
        pass

    def report_progress(self, *, has_stepped: bool) -> None:
        self.told.append(has_stepped)

    def snapshot(self) -> EngineStatus:
        return EngineStatus(num_waiting=len(self.work))

    def check_integrity(self) -> BlockCounts:
        return BlockCounts(1, 0, 0)

    def device_failure(self) -> str:
        return ""

    def fail_step(self, error: Exception) -> None:
        raise error

    def close(self) -> None:
        pass


@pytest.fixture
def engine() -> Iterator[SleepyEngine]:
    engine = SleepyEngine()
    engine.start()
    yield engine
    engine.go.set()
    assert engine.stop()


def test_an_idle_loop_turns(engine: SleepyEngine) -> None:
    wait_until(lambda: engine.num_steps > 3)
    assert not engine.is_stuck(time.monotonic())


def test_a_step_that_hangs_is_stuck_and_one_that_ends_is_not(engine: SleepyEngine) -> None:
    engine.step_times = StepTimes(fixed_s=0.3)
    engine.submit("work")
    assert engine.in_step.wait(60)
    wait_until(lambda: engine.is_stuck(time.monotonic()))
    assert engine.alive
    engine.go.set()
    wait_until(lambda: engine.num_done == 1 and not engine.is_stuck(time.monotonic()))


def test_the_limit_follows_the_steps(engine: SleepyEngine) -> None:
    wait_until(lambda: engine.num_steps > 0)
    idle = engine.turn_limit_s
    engine.submit("work")
    assert engine.in_step.wait(60)
    assert engine.turn_limit_s == LONGEST_S > idle
    engine.go.set()
    wait_until(lambda: engine.num_done == 1 and not engine.status.num_waiting)
    engine.in_step.clear()
    engine.go.clear()
    engine.submit("work")
    assert engine.in_step.wait(60)
    assert engine.turn_limit_s < LONGEST_S


def test_work_is_told_before_the_step_that_does_it(engine: SleepyEngine) -> None:
    """A router that saw an idle worker all through a long first step would take the request for lost."""
    engine.submit("work")
    assert engine.in_step.wait(60)
    assert engine.status.num_waiting == 1


def test_the_inbox_is_bounded(engine: SleepyEngine) -> None:
    engine.submit("work")
    assert engine.in_step.wait(60)
    assert all(engine.submit(number) for number in range(INBOX_BOUND))
    assert not engine.submit("one too many")


@pytest.mark.slow
def test_progress_is_told_once_a_while_and_whether_anything_was_computed(engine: SleepyEngine) -> None:
    engine.go.set()
    engine._progress_told_at = 0.0
    wait_until(lambda: engine.told)
    assert engine.told == [False]
    engine.submit("work")
    wait_until(lambda: engine.num_done == 1)
    wait_until(lambda: len(engine.told) >= 2)
    assert engine.told[1:2] == [True]


class LostEngine(SleepyEngine):
    """A rank of its worker dies in the first step. To fail the step's requests would be to answer for the worker."""

    def step(self, now: float) -> None:
        self.num_done += 1
        raise RankLost("rank 1 is gone")

    def fail_step(self, error: Exception) -> None:
        self.told.append(True)


def test_a_lost_rank_ends_the_engine_at_once(caplog: pytest.LogCaptureFixture) -> None:
    engine = LostEngine()
    engine.submit("work")
    engine.start()
    wait_until(lambda: not engine.alive)
    assert isinstance(engine.failure, RankLost) and "engine died: rank 1 is gone" in caplog.text
    assert (engine.num_done, engine.told) == (1, [])
    assert engine.stop()
