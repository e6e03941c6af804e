"""What the clock says, and what it surely has reached, while it is set ahead and back."""

from __future__ import annotations

import logging

import pytest

from common.machine.wall_clock import AGES_S, JUMP_S, LEASES_S, WallClock, seconds_of_machine

MONTH_S = 31 * 86400.0


class Machine:
    """Time passes for both clocks by `run`; `set` moves the wall clock alone."""

    def __init__(self) -> None:
        self.seconds, self.wall = 50.0, 1e9
        self.clock = WallClock(lambda: self.wall, lambda: self.seconds)

    def run(self, seconds: float) -> None:
        self.seconds += seconds
        self.wall += seconds

    def set(self, by_s: float) -> None:
        self.wall += by_s

    def bounds(self, doubt_s: float = AGES_S) -> tuple[float, float]:
        """Relative to the wall clock."""
        return self.clock.earliest(doubt_s) - self.wall, self.clock.latest(doubt_s) - self.wall


@pytest.fixture
def machine() -> Machine:
    return Machine()


def test_a_clock_that_runs_is_believed(machine: Machine) -> None:
    for _ in range(100):
        machine.run(1000.0)
        machine.set(0.5 * JUMP_S)  # corrected all the time
        assert machine.bounds() == (0.0, 0.0) and machine.clock.now() == machine.wall


@pytest.mark.parametrize(("by_s", "bounds"), [(MONTH_S, (-MONTH_S, 0.0)), (-MONTH_S, (0.0, MONTH_S))])
def test_a_jump_is_doubted_for_a_while(
    machine: Machine, caplog: pytest.LogCaptureFixture, by_s: float, bounds: tuple[float, float]
) -> None:
    machine.bounds()
    machine.set(by_s)
    for doubt_s in (AGES_S, LEASES_S):
        assert machine.bounds(doubt_s) == bounds
    machine.run(LEASES_S)
    assert machine.bounds(LEASES_S) == (0.0, 0.0) and machine.bounds() == bounds
    machine.run(AGES_S - LEASES_S)
    assert machine.bounds() == (0.0, 0.0)
    said = f"jumped by {by_s:+.0f} s: the new time expires nothing for 3600 s"
    assert [record.getMessage() for record in caplog.records] == [f"the wall clock {said}"]


def test_a_clock_that_was_wrong_for_a_moment_has_done_nothing(machine: Machine) -> None:
    machine.bounds()
    machine.set(MONTH_S)
    machine.run(6.0)
    assert machine.bounds() == (-MONTH_S, 0.0)
    machine.set(-MONTH_S)
    assert machine.bounds() == (0.0, MONTH_S)
    machine.run(AGES_S + 1)
    assert machine.bounds() == (0.0, 0.0)


def test_a_machine_that_slept_is_believed(machine: Machine) -> None:
    """The clock of the machine counts the time."""
    machine.run(MONTH_S)
    assert machine.bounds() == (0.0, 0.0)


def test_a_start_after_a_long_time_is_doubted_for_ages_alone(machine: Machine) -> None:
    machine.clock.observe(machine.wall - MONTH_S)
    assert machine.bounds() == (-MONTH_S, 0.0) and machine.bounds(LEASES_S) == (0.0, 0.0)
    machine.run(AGES_S)
    assert machine.bounds() == (0.0, 0.0)
    machine.clock.observe(machine.wall + MONTH_S)  # of a clock that was ahead
    machine.clock.observe(machine.wall - 1.0)
    assert machine.bounds() == (0.0, 0.0)


def test_the_clock_of_the_machine_runs(caplog: pytest.LogCaptureFixture) -> None:
    before = seconds_of_machine()
    clock = WallClock()
    with caplog.at_level(logging.WARNING):
        assert clock.earliest(AGES_S) == pytest.approx(clock.now(), abs=JUMP_S) and seconds_of_machine() >= before
