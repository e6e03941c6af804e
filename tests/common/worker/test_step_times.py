import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.worker.step_times import FACTOR, FLOOR_S, LONGEST_S, StepTimes, work_of


def known(**sizes: float) -> StepTimes:
    """Steps of `t512=0.2`: 512 tokens that took 0.2 s."""
    times = StepTimes()
    for name, step_s in sizes.items():
        times.add(int(name[1:]), float(name[1:]), step_s)
    return times


def test_nothing_known_waits_longest():
    assert StepTimes().limit_s(512) == LONGEST_S


def test_the_first_step_of_a_slow_machine_gets_its_time() -> None:
    assert StepTimes(token_s=0.001).limit_s(512) == LONGEST_S
    assert StepTimes(token_s=0.2).limit_s(512) == pytest.approx(3 * 0.2 * 512)
    assert StepTimes(token_s=0.2, fixed_s=7.0).limit_s(512) == 7.0
    times = StepTimes(token_s=0.2)
    times.add(512, 512.0, 40.0)
    assert times.limit_s(512) == 120.0  # what was measured counts, once there is any


def test_a_fast_worker_is_found_stuck_within_seconds():
    assert known(t512=0.01).limit_s(512) == FLOOR_S


def test_a_slow_worker_gets_its_time():
    assert known(t512=1.5).limit_s(512) == FACTOR * 1.5
    assert known(t512=5.0).limit_s(512) == LONGEST_S
    assert known(t512=50.0).limit_s(512) == 150.0


def test_a_larger_step_than_any_before_gets_more():
    times = known(t64=0.5)
    assert times.limit_s(64) == FACTOR * 0.5
    assert times.limit_s(128) == FACTOR * 1.0


def test_a_smaller_step_gets_what_the_next_larger_took():
    assert known(t512=1.0, t16=0.001).limit_s(100) == FACTOR * 1.0
    assert known(t512=1.0, t16=0.001).limit_s(16) == FLOOR_S


def test_one_slow_step_is_forgotten_slowly():
    times = known(t512=2.0)
    for _ in range(10):
        times.add(512, 512.0, 0.1)
    assert FACTOR * 1.0 < times.limit_s(512) < FACTOR * 2.0
    for _ in range(400):
        times.add(512, 512.0, 0.1)
    assert times.limit_s(512) == FLOOR_S


def test_a_long_context_weighs_more():
    assert work_of(1, 1) < work_of(1, 100_000)
    assert work_of(512, 512) < work_of(512, 30_000)


def test_the_rate_is_that_of_full_steps():
    assert known(t1=0.05).full_tokens_per_s == 0
    assert known(t1=0.05, t512=0.25).full_tokens_per_s == pytest.approx(2048)


def test_a_fixed_limit_holds_for_everything():
    times = StepTimes(fixed_s=7.0)
    times.add(512, 512.0, 30.0)
    assert (times.limit_s(512), times.idle_limit_s) == (7.0, 7.0)


@given(st.lists(st.tuples(st.integers(1, 4096), st.floats(1e-6, 100.0)), max_size=50), st.integers(1, 10_000))
def test_the_limit_is_always_between_its_bounds_and_above_what_was_seen(steps, size):
    times = StepTimes()
    for tokens, step_s in steps:
        times.add(tokens, float(tokens), step_s)
        assert times.limit_s(tokens) >= 3 * step_s
    assert times.limit_s(size) >= FLOOR_S
