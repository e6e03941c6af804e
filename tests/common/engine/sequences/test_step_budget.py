"""Sizes of steps: the largest that keep a goal, the smallest that lose no tokens a second, within the flags' bounds."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.engine.sequences.step_budget import (
    DECREASE,
    EFFICIENT_SHARE,
    INCREASE,
    JOIN_STEPS,
    LEAST,
    LEAST_BATCH,
    LEAST_CHUNK,
    LEAST_LEARNT_STEPS,
    LEAST_LEFT_SHARE,
    LEAST_STEP,
    MOST,
    MOST_DECREASE,
    PERIOD,
    START,
    STRETCH,
    Knob,
    TokenGoal,
    batch_cap,
    late_step,
    local_chunk,
    prefill_step,
)
from common.latency.step_model import StepModel, StepShape

MODEL = StepModel(fixed_s=0.01, token_s=1e-4, pair_s=1e-8, row_s=1e-3, context_s=1e-6, num_steps=100)
GOAL, NONE = TokenGoal(0.05), TokenGoal()
ROWS = StepShape.of_rows(8, 8 * 500)
MODELS = st.builds(
    StepModel,
    **{name: st.floats(0, 0.1) for name in ("fixed_s", "floor_s", "row_s")},
    **{name: st.floats(0, 1e-3) for name in ("token_s", "context_s")},
    pair_s=st.floats(0, 1e-6),
    num_steps=st.just(100),
)


def test_without_a_goal_the_bounds_hold() -> None:
    assert local_chunk(MODEL, ROWS, 0, NONE, 128) == batch_cap(MODEL, 500, NONE, 128) == Knob(128, "bound")
    assert prefill_step(MODEL, 0, 512, has_goals=False) == Knob(512, "bound")


def test_while_nothing_is_known_the_bounds_hold() -> None:
    new, no_prompts = (
        msgspec.structs.replace(MODEL, num_steps=LEAST_LEARNT_STEPS - 1),
        msgspec.structs.replace(MODEL, token_s=0.0, pair_s=0.0),
    )
    assert local_chunk(no_prompts, ROWS, 0, GOAL, 128) == batch_cap(new, 500, GOAL, 128) == Knob(128, "bound")
    assert prefill_step(no_prompts, 0, 512, has_goals=True) == Knob(512, "bound")


def test_without_a_flag_the_usual_size_holds_until_predictions_choose() -> None:
    new = msgspec.structs.replace(MODEL, num_steps=LEAST_LEARNT_STEPS - 1)
    unread = msgspec.structs.replace(MODEL, token_s=0.0, pair_s=0.0)
    crowd = StepShape.of_rows(60, 0)
    assert batch_cap(new, 500, GOAL, 256, 64) == batch_cap(MODEL, 500, NONE, 256, 64) == Knob(64, "bound")
    assert batch_cap(MODEL, 50_000.0, GOAL, 256, 64) == Knob(64, "missed")
    assert local_chunk(unread, ROWS, 0, GOAL, 1024, 128) == local_chunk(MODEL, ROWS, 0, NONE, 1024, 128)
    assert local_chunk(unread, ROWS, 0, GOAL, 1024, 128) == Knob(128, "bound")
    assert local_chunk(MODEL, crowd, 0, GOAL, 1024, 128) == Knob(128, "missed")
    assert 128 < local_chunk(MODEL, ROWS, 0, GOAL, 1024, 128).value < 1024
    assert batch_cap(MODEL, 10.0, TokenGoal(0.5), 256, 64) == Knob(256, "bound")


def test_a_chunk_fills_what_the_sequences_leave_of_the_goal() -> None:
    knob = local_chunk(MODEL, ROWS, 1000, GOAL, 1000)
    assert knob.reason == "goal" and LEAST_CHUNK < knob.value < 1000
    step_s = lambda count: MODEL.seconds(ROWS + StepShape.of_prompt(1000, 1000 + count))  # noqa: E731
    assert step_s(knob.value) <= GOAL.limit_s < step_s(knob.value + 1)


def test_a_prompt_alone_delays_nobody() -> None:
    assert local_chunk(MODEL, StepShape(), 0, GOAL, 128) == Knob(128, "bound")


def test_prompts_go_on_beside_a_full_step_and_at_full_size_where_the_goal_is_missed_anyway() -> None:
    assert local_chunk(MODEL, StepShape.of_rows(37, 0), 0, GOAL, 128) == Knob(LEAST_CHUNK, "least")
    assert local_chunk(MODEL, StepShape.of_rows(37, 0), 0, GOAL, 8) == Knob(8, "bound")
    assert local_chunk(MODEL, StepShape.of_rows(60, 0), 0, GOAL, 128) == Knob(128, "missed")


def test_as_many_sequences_run_as_keep_the_goal() -> None:
    knob = batch_cap(MODEL, 500.0, GOAL, 64)
    assert knob.reason == "goal"
    step_s = lambda count: MODEL.seconds(StepShape.of_rows(count, 500 * count))  # noqa: E731
    assert step_s(knob.value) <= GOAL.limit_s < step_s(knob.value + 1)
    assert batch_cap(MODEL, 50_000.0, GOAL, 64) == Knob(64, "missed")
    assert batch_cap(MODEL, 12_000.0, GOAL, 64) == Knob(LEAST_BATCH, "least")
    assert batch_cap(MODEL, 12_000.0, GOAL, 2) == Knob(2, "bound")


@given(MODELS, st.floats(0, 1e5), st.floats(1e-4, 1.0), st.integers(1, 4096))
def test_a_cap_is_within_its_bounds_and_grows_with_the_goal(
    model: StepModel, context: float, goal_s: float, most: int
) -> None:
    knob = batch_cap(model, context, TokenGoal(goal_s), most)
    assert min(LEAST_BATCH, most) <= knob.value <= most
    if knob.reason == "goal":
        shape = StepShape.of_rows(knob.value, int(knob.value * context))
        assert model.seconds(shape) <= TokenGoal(goal_s).limit_s * 1.0001
        assert batch_cap(model, context, TokenGoal(2 * goal_s), most).value >= knob.value


@given(MODELS, st.integers(0, 64), st.integers(0, 100_000), st.floats(1e-4, 1.0), st.integers(1, 4096))
def test_a_chunk_is_within_its_bounds(model: StepModel, rows: int, start: int, goal_s: float, most: int) -> None:
    shape = StepShape.of_rows(rows, rows * 100)
    knob = local_chunk(model, shape, start, TokenGoal(goal_s), most)
    assert min(LEAST_CHUNK, most) <= knob.value <= most
    if knob.reason == "goal":
        step_s = model.seconds(shape + StepShape.of_prompt(start, start + knob.value))
        assert step_s <= TokenGoal(goal_s).limit_s * 1.0001


def test_the_smallest_prefill_step_that_is_efficient() -> None:
    model = StepModel(fixed_s=2e-2, floor_s=0.0, token_s=1e-3, num_steps=16)
    knob = prefill_step(model, 0, 2048, has_goals=True)
    rate = lambda size: size / model.seconds(StepShape.of_prompt(0, size))  # noqa: E731
    assert knob.reason == "efficiency" and knob.value < 2048
    assert rate(knob.value) >= EFFICIENT_SHARE * rate(2048) > rate(knob.value - 2048 // 16)


def test_attention_makes_no_step_small() -> None:
    """Later tokens of a prompt cost more in steps of any size."""
    model = StepModel(fixed_s=4e-3, token_s=3e-4, pair_s=5e-7, num_steps=16)
    assert prefill_step(model, 0, 512, has_goals=True).value >= 256
    whole = StepShape.of_prompt(0, 512)
    size = prefill_step(model, 0, 512, has_goals=True).value
    assert model.steps_s(whole, size) <= model.steps_s(whole, 512) / EFFICIENT_SHARE * 1.02
    slow = StepModel(fixed_s=4e-2, token_s=3e-3, num_steps=16)
    assert late_step(slow, 0, 512, 0.0) == 64, "what is late anyway may take a fifth longer"
    gpu = StepModel(fixed_s=4e-3, floor_s=8e-3, token_s=4e-5, num_steps=16)
    assert late_step(gpu, 0, 2048, 0.0) in range(1000, 1200), "50 ms"
    assert late_step(gpu, 0, 2048, 0.15) in range(1700, 1900), "75 ms are half of what a new prompt can spare"
    assert late_step(gpu, 0, 2048, 1.0) == 2048


def test_a_model_that_saw_one_size_makes_no_step_tiny() -> None:
    """It attributes all of a step to tokens, and eight steps of 64 may take far longer than one of 512."""
    assert prefill_step(StepModel(token_s=5e-4, num_steps=16), 0, 512, has_goals=True).value == 200
    few = StepModel(token_s=5e-4, num_steps=15)
    assert prefill_step(few, 0, 512, has_goals=True) == Knob(512, "bound"), "the first steps are not limited"


def test_a_floor_is_filled() -> None:
    model = StepModel(floor_s=0.1, token_s=1e-4, num_steps=16)
    assert prefill_step(model, 0, 2048, has_goals=True).value >= EFFICIENT_SHARE * 1000


def test_where_large_steps_cost_hardly_more_the_bound_is_best() -> None:
    assert prefill_step(StepModel(fixed_s=1.0, token_s=1e-6, num_steps=1), 0, 512, has_goals=True).reason == "bound"
    assert prefill_step(MODEL, 0, LEAST_STEP, has_goals=True) == Knob(LEAST_STEP, "bound")


@given(MODELS, st.integers(0, 100_000), st.integers(1, 1_000_000))
def test_a_prefill_step_is_within_its_bounds(model: StepModel, start: int, most: int) -> None:
    assert min(LEAST_STEP, most) <= prefill_step(model, start, most, has_goals=True).value <= most


def after(goal: TokenGoal, means: list[float], periods: int = 1, predicted_s: float = 0.01) -> TokenGoal:
    """Stretches of tokens with these mean gaps."""
    for mean_s in means * periods:
        for _ in range(STRETCH):
            goal.observe(mean_s, predicted_s)
    return goal


def test_no_goal_limits_nothing() -> None:
    goal = after(TokenGoal(), [9.0] * PERIOD)
    assert not goal.is_set and goal.limit_s == math.inf


def test_the_share_follows_the_tail_and_not_the_mean() -> None:
    few_late = [0.01] * (PERIOD - 1) + [9.0]
    assert after(TokenGoal(0.05), few_late).share == pytest.approx(START + INCREASE)
    assert after(TokenGoal(0.05), [0.01] * (PERIOD - 1)).share == START, "before the period is over nothing is gained"


def test_the_share_shrinks_by_as_much_as_the_tail_is_late_and_at_once() -> None:
    late = [0.01, 0.052, 0.01, 9.0]
    assert after(TokenGoal(0.05), late).share == pytest.approx(START * DECREASE * 0.05 / 0.052)
    assert after(TokenGoal(0.05), [0.07, 9.0]).share == pytest.approx(START * MOST_DECREASE), "not by more than a tenth"
    goal = after(TokenGoal(0.05), [*late, *[0.01] * (PERIOD - 2), 0.06])
    assert goal.share == pytest.approx(START * DECREASE * 0.05 / 0.052), "what was late before counts once"


def test_single_long_gaps_count_by_what_they_add() -> None:
    goal = TokenGoal(0.05)
    for number in range(PERIOD * STRETCH):
        goal.observe(0.2 if number % STRETCH == 0 else 0.02, 0.02)
    assert goal.share == pytest.approx(START + INCREASE)


def test_the_share_is_bounded() -> None:
    assert after(TokenGoal(0.05), [0.01] * PERIOD, periods=50).share == MOST
    assert after(TokenGoal(0.05), [0.09] * PERIOD, periods=50).share == LEAST
    assert after(TokenGoal(0.05), [0.09] * PERIOD, periods=50).limit_s == pytest.approx(LEAST * 0.05)


def test_short_answers_leave_less_of_the_goal_to_each_step() -> None:
    goal = TokenGoal(0.05)
    limit_s = goal.limit_s
    for _ in range(200):
        goal.answered(7)
    assert goal.limit_s == pytest.approx(limit_s * 6 / (6 + JOIN_STEPS), rel=0.01)
    for _ in range(200):
        goal.answered(2)
        goal.answered(1)  # it has no gap at all
    assert goal.limit_s == pytest.approx(limit_s * LEAST_LEFT_SHARE)
    for _ in range(400):
        goal.answered(301)
    assert goal.limit_s == pytest.approx(limit_s, rel=0.01)


def test_a_goal_that_no_step_could_keep_teaches_nothing() -> None:
    assert after(TokenGoal(0.05), [0.2] * PERIOD, predicted_s=0.06).share == START
