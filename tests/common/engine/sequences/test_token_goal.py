"""The share of a goal that steps are planned for: up by a little, down by a part, as measured gaps say."""

from __future__ import annotations

import math

import pytest

from common.engine.sequences.step_budget import (
    DECREASE,
    INCREASE,
    JOIN_STEPS,
    LEAST,
    LEAST_LEFT_SHARE,
    MOST,
    MOST_DECREASE,
    PERIOD,
    START,
    STRETCH,
    TokenGoal,
)


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
