"""Where draft tokens come from, how likely they are, and how many of them pay."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.engine.sequences.step_budget import START, TokenGoal
from decode_worker.drafting import draft_tokens
from decode_worker.drafting.draft_tokens import (
    FORCED,
    LONGEST_MATCH,
    NOTHING,
    AcceptanceRates,
    Draft,
    PromptLookup,
    num_accepted,
)
from decode_worker.drafting.row_costs import MAX_SLOWDOWN, MIN_GAIN, RowCosts

# ---------------------------------------------------------------- the search


def searched(tokens: list[int], num_unseen: int, num_tokens: int) -> Draft:
    """`PromptLookup.draft_for` as it is said to be, token by token."""
    last, best, found = len(tokens), 0, 0
    for end in range(1, last):
        match = 0
        while match < min(LONGEST_MATCH, end) and tokens[end - match - 1] == tokens[last - match - 1]:
            match += 1
        if match and match >= best:
            best, found = match, end
    if not best:
        return NOTHING
    text = list(tokens)
    for place in range(num_unseen + num_tokens):
        text.append(text[found + place])
    new = tuple(text[last:])
    kinds = tuple(min(best + place, LONGEST_MATCH) for place in range(len(new)))
    return Draft(new[num_unseen:], new[:num_unseen], kinds)


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=60),
    st.integers(0, 1),
    st.integers(1, 8),
    st.integers(1, 60),
)
def test_the_search_finds_what_plain_comparison_finds(
    tokens: list[int], num_unseen: int, num_tokens: int, first: int
) -> None:
    """However the text came."""
    lookup = PromptLookup()
    lookup.draft_for(tokens[:first], 0, 3)
    assert lookup.draft_for(tokens, num_unseen, num_tokens) == searched(tokens, num_unseen, num_tokens)


def test_a_text_that_says_nothing_twice_gives_nothing() -> None:
    assert PromptLookup().draft_for(list(range(1000)), 0, 8) == NOTHING
    assert PromptLookup().draft_for([5], 0, 8) == NOTHING


def test_the_longest_agreement_wins_over_the_latest() -> None:
    text = [1, 2, 3, 4, 50, 60, 9, 9, 4, 70, 80, 1, 2, 3, 4]
    draft = PromptLookup().draft_for(text, 0, 2)
    assert draft == Draft((50, 60), (), (4, 5))


def test_what_repeats_itself_is_guessed_on_and_on() -> None:
    assert PromptLookup().draft_for([8, 1, 2, 3, 1, 2, 3, 1, 2], 1, 5).token_ids == (1, 2, 3, 1, 2)


def test_only_the_last_tokens_are_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_tokens, "MAX_SEARCHED", 10)
    text = [1, 2, 7, *range(100, 120), 1, 2]
    assert PromptLookup().draft_for(text, 0, 1) == NOTHING
    assert PromptLookup().draft_for([*text, 30, 1, 2], 0, 1).token_ids == (30,)
    monkeypatch.setattr(draft_tokens, "MAX_COMPARED", 2)
    assert PromptLookup().draft_for([1, 2, 7, 2, 8, 2, 9, 1, 2], 0, 1) == Draft((9,), (), (1,))


def test_right_guesses_are_counted_up_to_the_first_wrong_one() -> None:
    draft = Draft((5, 6, 7), (), (4, 5, 6))
    assert [num_accepted(draft, sampled) for sampled in ([5, 6, 7, 8], [5, 6, 9, 7], [4, 6, 7, 8])] == [3, 2, 0]
    assert num_accepted(NOTHING, [5]) == 0


# ---------------------------------------------------------------- chances


def test_a_chance_is_that_of_all_before_it_too() -> None:
    rates = AcceptanceRates()
    one, two = rates.chances(Draft((5, 6), (), (3, 4)))
    assert 0 < two < one < 1
    assert rates.chances(Draft((6,), (5,), (3, 4))) == [two]


def test_rates_follow_what_comes_true() -> None:
    rates, rng = AcceptanceRates(), random.Random(0)
    for _ in range(2000):
        good, bad = Draft((5,), (), (8,)), Draft((5,), (), (2,))
        rates.learn(good, [5 if rng.random() < 0.9 else 6])
        rates.learn(bad, [5 if rng.random() < 0.1 else 6])
    assert rates.chances(good)[0] == pytest.approx(0.9, abs=0.15)
    assert rates.chances(bad)[0] == pytest.approx(0.15, abs=0.15)


def test_nothing_is_learnt_of_guesses_behind_a_wrong_one() -> None:
    rates = AcceptanceRates()
    draft = Draft((5, 6, 7), (4,), (3, 4, 5, 6))
    before = rates.chances(Draft((1,), (), (6,)))
    rates.learn(draft, [4, 5, 9])
    assert rates.chances(Draft((1,), (), (3,))) > AcceptanceRates().chances(Draft((1,), (), (3,)))
    assert rates.chances(Draft((1,), (), (5,))) < AcceptanceRates().chances(Draft((1,), (), (5,)))
    assert rates.chances(Draft((1,), (), (6,))) == before


def test_what_was_never_right_is_tried_again_some_day() -> None:
    rates, bad, other = AcceptanceRates(), Draft((5,), (), (2,)), Draft((5,), (), (FORCED,))
    for _ in range(200):
        rates.learn(bad, [6])
    assert rates.chances(bad)[0] < 0.1
    for _ in range(500):
        rates.learn(other, [5])
    assert rates.chances(bad)[0] > 0.25


# ---------------------------------------------------------------- costs


def costs_of(seconds: dict[int, float]) -> RowCosts:
    costs = RowCosts()
    for num_rows, step_s in seconds.items():
        costs.add(num_rows, step_s)
    return costs


def test_costs_between_known_sizes_lie_between_them() -> None:
    costs = costs_of({2: 1.0, 6: 1.8})
    assert costs.seconds(4) == pytest.approx(1.4, rel=0.01)
    assert costs.seconds(1) == costs.seconds(2)
    assert costs.seconds(20) == costs.seconds(6)  # free, until it is tried
    assert RowCosts().seconds(3) == 0.0


def test_guesses_pay_by_what_rows_cost_and_by_how_likely_they_are() -> None:
    cheap, dear = costs_of({1: 1.0, 9: 1.1}), costs_of({1: 1.0, 2: 1.8, 3: 2.6})
    likely, unlikely = [0.9, 0.8, 0.7], [0.04, 0.03]
    assert cheap.worthwhile(1, likely) == 3
    assert cheap.worthwhile(1, unlikely) == 0  # within what a step loses that is not launched ahead
    assert dear.worthwhile(1, likely) == 0
    assert RowCosts().worthwhile(1, likely) == 0  # nothing is known yet


def test_the_last_row_that_pays_is_the_last() -> None:
    costs = costs_of({size: 1.0 + 0.1 * (size - 1) for size in range(1, 10)})
    chances = [0.9, 0.6, 0.3, 0.05, 0.04]
    rates = [(1 + sum(chances[:count])) / costs.seconds(1 + count) for count in range(6)]
    best = max(range(6), key=lambda count: rates[count])
    assert costs.worthwhile(1, chances) == best and rates[best] > MIN_GAIN * rates[0]


def test_no_step_becomes_much_longer_for_them() -> None:
    costs = costs_of({2: 1.0, 6: MAX_SLOWDOWN * 1.01, 9: 1.6})
    assert costs.worthwhile(2, [1.0] * 7) == 3
    assert costs_of({8: 1.0, 16: 2.0}).worthwhile(8, [1.0] * 8) == 0  # nor for tokens that others lose


def test_with_a_goal_a_step_may_take_as_long_as_that_allows() -> None:
    costs = costs_of({2: 1.0, 10: 1.88})  # 0.11 for each row
    chances = [1.0] * 8
    counts = [costs.worthwhile(2, chances, TokenGoal(limit_s / START)) for limit_s in (0.9, 1.05, 1.15, 1.6, 9.0)]
    assert counts == [4, 0, 1, 5, 8]
    assert costs.worthwhile(2, chances) == 4, "as for a goal that is missed anyway"


def test_one_step_that_was_stopped_says_little_about_its_size() -> None:
    costs = costs_of({1: 1.0, 5: 1.2})
    costs.add(5, 100.0)
    costs.add(4, 100.0)  # the first of its size
    assert costs.seconds(5) < 1.5 and costs.seconds(4) < 3.0
    for _ in range(40):
        costs.add(4, 1.15)
    assert costs.seconds(4) < 1.3


def test_a_size_that_was_slow_is_tried_again_some_day() -> None:
    costs = costs_of({1: 1.0, 4: 1.0})
    for _ in range(100):
        costs.add(4, 3.0)
    assert costs.worthwhile(1, [1.0] * 3) == 0
    for _ in range(1500):
        costs.add(1, 1.0)
    assert costs.worthwhile(1, [1.0] * 3) == 3
