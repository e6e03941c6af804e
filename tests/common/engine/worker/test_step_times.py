"""When a step must be stuck: far beyond what the worker's model and its slowest steps say."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.engine.worker.step_times import FACTOR, FLOOR_S, LONGEST_S, StepTimes, work_of
from common.latency.step_fit import StepFit
from common.latency.step_model import StepModel, StepShape

UNKNOWN = StepModel()
FAST = StepModel(fixed_s=1e-3, token_s=1e-5, row_s=1e-4, pair_s=1e-10, context_s=1e-9, num_steps=9)
SLOW = StepModel(fixed_s=0.5, token_s=2e-3, row_s=0.1, pair_s=1e-8, context_s=1e-7, num_steps=9)
FULL, ROWS = StepShape.of_prompt(0, 512), StepShape.of_rows(4, 400)


def known(model: StepModel = UNKNOWN, **sizes: float) -> StepTimes:
    """Steps of `t512=0.2`: 512 prompt tokens that took 0.2 s."""
    times = StepTimes()
    for name, step_s in sizes.items():
        times.add(StepShape(num_tokens=int(name[1:])), step_s, model)
    return times


def tokens(count: int) -> StepShape:
    return StepShape(num_tokens=count)


def test_nothing_known_waits_longest() -> None:
    assert StepTimes().limit_s(FULL, UNKNOWN) == LONGEST_S


def test_the_first_step_of_a_slow_machine_gets_its_time() -> None:
    assert StepTimes(token_s=0.001).limit_s(tokens(512), UNKNOWN) == LONGEST_S
    assert StepTimes(token_s=0.2).limit_s(tokens(512), UNKNOWN) == pytest.approx(3 * 0.2 * 512)
    assert StepTimes(token_s=0.2, fixed_s=7.0).limit_s(tokens(512), UNKNOWN) == 7.0
    times = StepTimes(token_s=0.2)
    times.add(tokens(512), 40.0, UNKNOWN)
    assert times.limit_s(tokens(512), UNKNOWN) == 120.0  # what was measured counts, once there is any


def test_before_the_model_is_known_steps_take_what_the_slowest_took() -> None:
    assert known(t512=0.01).limit_s(tokens(512), UNKNOWN) == FLOOR_S
    assert known(t512=1.5).limit_s(tokens(16), UNKNOWN) == FACTOR * 1.5
    assert known(t512=5.0).limit_s(tokens(512), UNKNOWN) == LONGEST_S
    assert known(t64=0.5).limit_s(tokens(128), UNKNOWN) == FACTOR * 1.0


def test_a_slow_worker_gets_its_time() -> None:
    times = known(FAST, t512=0.001)
    assert times.limit_s(FULL, FAST) == FLOOR_S
    assert times.limit_s(FULL, SLOW) == pytest.approx(FACTOR * SLOW.seconds(FULL))
    slower = msgspec.structs.replace(SLOW, fixed_s=50.0)
    assert times.limit_s(FULL, slower) == pytest.approx(3 * slower.seconds(FULL))


def test_a_kind_that_the_model_does_not_know_takes_its_share_of_the_slowest_step() -> None:
    times, rows_only = StepTimes(), msgspec.structs.replace(SLOW, token_s=0.0, pair_s=0.0)
    times.add(StepShape.of_rows(2, 0), 0.5, rows_only)
    assert times.limit_s(tokens(4), rows_only) == FACTOR * 1.0
    prompts = known(SLOW, t512=1.5)
    assert prompts.limit_s(StepShape.of_rows(1, 0), SLOW) == FACTOR * 1.5, "no row was computed yet"


def test_one_slow_step_is_forgotten_slowly() -> None:
    times = known(FAST, t512=2.0)
    assert times.limit_s(FULL, FAST) > FACTOR * 1.9
    for _ in range(10):
        times.add(FULL, FAST.seconds(FULL), FAST)
    assert FACTOR * 1.0 < times.limit_s(FULL, FAST) < FACTOR * 2.0
    for _ in range(400):
        times.add(FULL, FAST.seconds(FULL), FAST)
    assert times.limit_s(FULL, FAST) == FLOOR_S


def test_a_long_context_weighs_more_while_nothing_is_known_of_attention() -> None:
    assert work_of(StepShape.of_rows(1, 1)) < work_of(StepShape.of_rows(1, 100_000))
    shallow = msgspec.structs.replace(SLOW, pair_s=0.0)
    deep = StepShape.of_prompt(30_000, 30_100)
    times = known(shallow, t512=1.0)
    assert times.limit_s(deep, shallow) == LONGEST_S
    assert times.limit_s(StepShape.of_prompt(0, 100), shallow) < LONGEST_S / 2


def test_a_fixed_limit_holds_for_everything() -> None:
    times = StepTimes(fixed_s=7.0)
    times.add(FULL, 30.0, FAST)
    assert (times.limit_s(FULL, FAST), times.idle_limit_s) == (7.0, 7.0)


SHAPES = st.builds(StepShape, st.integers(0, 4096), st.integers(0, 10**8), st.integers(1, 64), st.integers(0, 10**6))


@given(st.lists(st.tuples(SHAPES, st.floats(1e-6, 100.0)), max_size=50), SHAPES)
def test_the_limit_is_always_between_its_bounds_and_above_what_was_seen(
    steps: list[tuple[StepShape, float]], shape: StepShape
) -> None:
    times, fit = StepTimes(), StepFit()
    for seen, step_s in steps:
        fit.observe(seen, step_s)
        times.add(seen, step_s, fit.model)
        assert times.limit_s(seen, fit.model) >= 2.999 * step_s
    assert times.limit_s(shape, fit.model) >= FLOOR_S
