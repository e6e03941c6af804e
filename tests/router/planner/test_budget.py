"""One budget over the pools of a model, and over models whose planners ask one after the other."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.wire.message_fields import Role
from router.planner.budget import Ask, Budget, divide
from router.planner.pool import Bounds

EACH: Mapping[Role, Bounds] = {"prefill": Bounds(0, 64), "decode": Bounds(0, 64)}


def ask(prefill: int, decode: int, bounds: Mapping[Role, Bounds] = EACH, paid: Mapping[Role, int] | None = None) -> Ask:
    return Ask({"prefill": prefill, "decode": decode}, bounds, paid or {})


def rounds(budget: Budget, asks: Mapping[str, Ask], times: int = 2) -> dict[str, Mapping[Role, int]]:
    """What each model has after so many looks."""
    found: dict[str, Mapping[Role, int]] = {}
    for _ in range(times):
        found |= {model: budget.fit(model, one).allowed for model, one in asks.items()}
    return found


def test_bounds_and_budget_share_what_there_is() -> None:
    bounds: Mapping[Role, Bounds] = {"prefill": Bounds(1, 8, price=1.0), "decode": Bounds(1, 10, price=2.0)}
    found = Budget().fit("", ask(6, 12, bounds))
    assert dict(found.allowed) == {"prefill": 6, "decode": 10}
    assert found.shortfall == "12 decode workers are needed, but the maximum is 10"
    found = Budget(12.0).fit("", ask(6, 9, bounds))
    assert found.allowed["prefill"] + 2 * found.allowed["decode"] <= 12.0
    assert found.allowed["prefill"] / 6 == pytest.approx(found.allowed["decode"] / 9, abs=0.2)
    assert found.shortfall == "the needed workers cost 24, but the budget is 12"


def test_workers_without_a_machine_cost_nothing() -> None:
    bounds: Mapping[Role, Bounds] = {"prefill": Bounds(0, 8), "decode": Bounds(1, 8)}
    found = Budget(8.0).fit("", ask(6, 6, bounds, {"prefill": 2}))
    assert dict(found.allowed) == {"prefill": 6, "decode": 6}


def test_decode_workers_compute_prompts_where_the_budget_has_no_room_for_a_pool_of_each() -> None:
    assert dict(Budget(1.0).fit("", ask(3, 2)).allowed) == {"prefill": 0, "decode": 1}


def test_models_get_the_same_share_of_what_they_need() -> None:
    found = rounds(Budget(15.0), {"a": ask(8, 12), "b": ask(4, 6)})
    assert found == {"a": {"prefill": 4, "decode": 6}, "b": {"prefill": 2, "decode": 3}}


def test_a_dear_model_and_a_cheap_one_have_the_same_share() -> None:
    dear: Mapping[Role, Bounds] = {"prefill": Bounds(0, 64, 4.0), "decode": Bounds(0, 64, 4.0)}
    found = rounds(Budget(40.0), {"large": ask(8, 8, dear), "small": ask(8, 8)})
    assert found["large"] == found["small"] == {"prefill": 4, "decode": 4}


def test_what_one_model_does_not_need_another_has() -> None:
    budget = Budget(10.0)
    assert rounds(budget, {"a": ask(5, 5), "b": ask(0, 0)})["a"] == {"prefill": 5, "decode": 5}
    # b wakes up: it waits for one look, in which a is allowed less.
    found = budget.fit("b", ask(1, 1))
    assert found.allowed == {"prefill": 0, "decode": 0}
    assert found.shortfall == "the needed workers cost 2, but the budget is 10, of which other models use 10"
    assert budget.fit("a", ask(5, 5)).allowed == {"prefill": 4, "decode": 4}
    assert budget.fit("b", ask(1, 1)).allowed == {"prefill": 1, "decode": 1}


def test_more_models_than_workers_take_turns_as_they_wake_up() -> None:
    """A model that is served keeps its worker; one that wakes up has the first that is not needed any more."""
    budget = Budget(2.0)
    assert rounds(budget, {"a": ask(1, 1), "b": ask(0, 1), "c": ask(0, 0)}) == {
        "a": {"prefill": 0, "decode": 1},
        "b": {"prefill": 0, "decode": 1},
        "c": {"prefill": 0, "decode": 0},
    }
    assert rounds(budget, {"a": ask(1, 1), "b": ask(0, 1), "c": ask(0, 1)})["c"]["decode"] == 0
    assert rounds(budget, {"a": ask(0, 0), "b": ask(0, 1), "c": ask(0, 1)})["c"]["decode"] == 1


def test_the_fewest_workers_of_each_model_are_always_allowed() -> None:
    least: Mapping[Role, Bounds] = {"prefill": Bounds(1, 8), "decode": Bounds(2, 8)}
    found = rounds(Budget(6.0), {"a": ask(8, 8), "b": ask(0, 0, least)})
    assert found["b"] == {"prefill": 1, "decode": 2}
    assert sum(found["a"].values()) == 3


def test_a_model_that_is_heard_last_keeps_its_part_of_what_it_has() -> None:
    budget = Budget(8.0)
    assert budget.fit("a", ask(4, 6)).allowed == {"prefill": 3, "decode": 5}
    first = budget.fit("b", ask(4, 6)).allowed
    assert first == {"prefill": 2, "decode": 2}, "its workers did not end because a was heard first"
    assert sum(budget.fit("a", ask(4, 6)).allowed.values()) == 4


bounds_of_models = st.fixed_dictionaries(
    {
        model: st.builds(
            lambda least, price: {"prefill": Bounds(least, 12, price), "decode": Bounds(least, 12, price)},
            st.integers(0, 1),
            st.sampled_from([0.1, 0.5, 1.0, 3.0]),
        )
        for model in "abc"
    }
)
NEEDS = st.tuples(st.integers(0, 20), st.integers(0, 20))


@given(bounds_of_models, st.lists(st.tuples(st.sampled_from("abc"), NEEDS), max_size=30), st.floats(20.0, 60.0))
def test_all_models_together_never_cost_more_than_the_budget(
    bounds: dict[str, Mapping[Role, Bounds]], looks: list[tuple[str, tuple[int, int]]], most: float
) -> None:
    """Whatever each needs at each look, in whatever order they are heard. No pool shrinks below its part."""
    budget, asked = Budget(most), {model: ask(0, 0, own) for model, own in bounds.items()}
    allowed = rounds(budget, asked)
    for model, needs in looks:
        asked[model] = ask(*needs, bounds[model])
        before, allowed[model] = allowed[model], budget.fit(model, asked[model]).allowed
        assert sum(asked[name].cost(nums) for name, nums in allowed.items()) <= most + 1e-6
        for role, part in divide(asked, most, allowed | {model: before})[model].items():
            assert min(part, before[role]) <= allowed[model][role] <= part
    settled = rounds(budget, asked, 3)
    assert settled == divide(asked, most, settled)


@given(bounds_of_models, st.fixed_dictionaries(dict.fromkeys("abc", NEEDS)), st.floats(1.0, 60.0))
def test_a_division_leaves_no_room_for_a_worker_that_is_needed(
    bounds: dict[str, Mapping[Role, Bounds]], needs: dict[str, tuple[int, int]], budget: float
) -> None:
    asked = {model: ask(*needs[model], bounds[model]) for model in needs}
    found = divide(asked, budget, {})
    cost = sum(asked[model].cost(nums) for model, nums in found.items())
    dearest = max(one["decode"].price for one in bounds.values())
    for model, nums in found.items():
        for role, num in nums.items():
            assert bounds[model][role].least <= num <= asked[model].bounded[role]
            assert num == asked[model].bounded[role] or cost > budget - dearest


def test_without_a_budget_nothing_is_divided() -> None:
    assert divide({"a": ask(60, 60)}, math.inf, {}) == {"a": {"prefill": 60, "decode": 60}}
