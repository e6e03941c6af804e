"""Steps beside prompts: as often as a goal wants, or a quarter of the time."""

from __future__ import annotations

import pytest

from common.engine.sequences.step_budget import START, TokenGoal
from decode_worker.pace import LONGEST_GAP_S, RESERVE, StepPace


def test_without_a_goal_steps_take_a_quarter_of_the_time() -> None:
    pace = StepPace(TokenGoal())
    for _ in range(20):
        pace.took(0.01)
    pace.began(5.0)
    assert pace.gap_s == pytest.approx(0.04)
    assert pace.wait_s(5.01) == pytest.approx(0.03)
    assert pace.wait_s(5.05) == 0.0


def test_no_gap_is_long_however_long_steps_are() -> None:
    pace = StepPace(TokenGoal())
    for _ in range(20):
        pace.took(0.09)
    assert pace.gap_s == LONGEST_GAP_S
    pace.began(1.0)
    assert pace.wait_s(1.3) == 0.0, "a step that takes longer is followed by the next one"


def test_a_goal_is_used_up_but_for_a_reserve() -> None:
    pace = StepPace(TokenGoal(0.05))
    pace.took(0.002)
    assert pace.gap_s == pytest.approx(RESERVE * START * 0.05)


def test_nothing_waits_before_the_first_step() -> None:
    assert StepPace(TokenGoal(0.05)).wait_s(100.0) == 0.0
