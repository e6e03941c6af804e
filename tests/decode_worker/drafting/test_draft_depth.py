"""How many tokens a draft model drafts, from what is known of costs and of acceptance."""

from __future__ import annotations

import pytest

from common.engine.sequences.step_budget import TokenGoal
from decode_worker.drafting.draft_tokens import MODEL_AT_FIRST, AcceptanceRates, DraftStats, of_model
from decode_worker.drafting.row_costs import RowCosts, StepSize, best_depth


def costs(row_s: float, first_s: float = 1.0) -> RowCosts:
    """Steps of one row take `first_s`, each further row `row_s`."""
    known = RowCosts()
    for num_rows in range(1, 65):
        known.add(num_rows, first_s + row_s * (num_rows - 1))
    return known


def chances(rate: float, count: int = 8) -> list[float]:
    return [rate**place for place in range(1, count + 1)]


def depth(
    steps: RowCosts, drafts: RowCosts, rate: float, num: int = 1, drafting: int | None = None, **more: float
) -> int:
    count = num if drafting is None else drafting
    goal = TokenGoal(more.pop("goal_s", 0.0))
    size = StepSize.plain(num)
    return best_depth(steps, drafts, size, count, chances(rate), goal, most_rows=64, **more).num_tokens


def test_cheap_drafts_that_are_accepted_are_long_and_dear_ones_short() -> None:
    cheap, dear = costs(0.0, 0.05), costs(0.0, 0.4)
    assert depth(costs(0.01), cheap, 0.9) == 8
    assert 2 <= depth(costs(0.01), dear, 0.9) <= 4
    assert depth(costs(0.01), cheap, 0.5) < 5
    assert depth(costs(0.01), costs(0.0, 0.9), 0.7) == 0, "a draft step takes as long as what it saves"
    assert depth(costs(0.01), cheap, 0.05) == 0


def test_the_chosen_depth_brings_the_most_tokens_a_second() -> None:
    steps, drafts, each = costs(0.05), costs(0.01, 0.2), chances(0.8)
    rates = [(1 + sum(each[:k])) / (steps.seconds(1 + k) + k * drafts.seconds(1)) for k in range(9)]
    found = best_depth(steps, drafts, StepSize.plain(1), 1, each, most_rows=64)
    assert found.num_tokens == max(range(9), key=rates.__getitem__)
    assert found.rate == pytest.approx(max(rates))


def test_large_batches_whose_rows_cost_draft_nothing() -> None:
    steps, drafts = costs(0.2), costs(0.02, 0.1)
    found = [depth(steps, drafts, 0.8, num) for num in (1, 4, 8, 16)]
    assert found[0] > 0 and found == sorted(found, reverse=True) and found[-1] == 0


def test_a_step_has_no_more_rows_than_it_may() -> None:
    assert depth(costs(0.0), costs(0.0, 0.01), 0.95, 16) == 3


def test_sequences_that_draft_nothing_wait_for_others_but_briefly() -> None:
    steps, drafts = costs(0.0), costs(0.0, 0.3)
    assert depth(steps, drafts, 0.95, 2) > 2
    assert depth(steps, drafts, 0.95, 2, drafting=1) == 1  # 1.3 steps, not 1.6


def test_a_goal_bounds_what_a_token_takes() -> None:
    steps, drafts = costs(0.0), costs(0.0, 0.2)
    found = [depth(steps, drafts, 0.9, 2, drafting=1, goal_s=goal_s) for goal_s in (1.25, 1.4, 1.65)]
    assert found == [0, 1, 2]
    without = depth(steps, drafts, 0.9, 2, drafting=1)
    assert depth(steps, drafts, 0.9, 2, drafting=1, goal_s=0.7) == without, "a plain step misses it anyway"


def test_what_costs_nothing_is_only_beaten_by_more() -> None:
    steps, drafts = costs(0.0), costs(0.0, 0.2)
    assert depth(steps, drafts, 0.8, other_rate=1.5) > 0
    assert depth(steps, drafts, 0.8, other_rate=9.0) == 0


def test_nothing_is_known_before_the_first_step() -> None:
    assert depth(RowCosts(), costs(0.0, 0.1), 0.9) == 0


def test_acceptance_is_learnt_by_place_and_tried_again() -> None:
    rates = AcceptanceRates()
    assert rates.of_model(2) == pytest.approx([MODEL_AT_FIRST, MODEL_AT_FIRST**2])
    for _ in range(200):
        rates.learn(of_model((5, 6, 7)), [5, 9])
    first, second, third = rates.of_model(3)
    assert first > 0.9 and second < 0.1 > third
    for _ in range(4000):
        rates.forget_model()
    assert rates.of_model(2)[1] > 0.5


def test_a_draft_step_that_was_slow_is_tried_again() -> None:
    drafts = costs(0.0, 0.9)
    assert depth(costs(0.0), drafts, 0.8) == 0
    for _ in range(2000):
        drafts.relax()
    assert depth(costs(0.0), drafts, 0.8) > 0


def test_drafts_are_counted_by_place() -> None:
    draft_stats = DraftStats()
    for num_tokens, num_accepted in ((3, 3), (3, 1), (2, 0)):
        draft_stats.add(num_tokens, num_accepted)
    assert (draft_stats.num_drafts, draft_stats.num_tokens, draft_stats.accepted) == (3, 8, [2, 1, 1])
