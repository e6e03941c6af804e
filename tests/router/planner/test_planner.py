"""When pools grow, shrink and stay, one look at a time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from common.wire.message_fields import Role
from router.planner.budget import Budget
from router.planner.offered_load import OfferedLoad, SampledRequest
from router.planner.planner import Plan, Planner
from router.planner.pool import Bounds, Fleet, Goals, WorkerKind

GOALS = Goals(0.5, 0.025, 0.95)
CHAT = tuple(SampledRequest(200 * (i % 8 + 1), 0, 40 * (i % 6 + 1)) for i in range(24))
Pools = Callable[..., Fleet]


def load(rate: float) -> OfferedLoad:
    return OfferedLoad(rate, rate, 1.0, CHAT, 0.0 if rate else 1e9)


def planner(least: int = 1, most: int = 40, **more: Any) -> Planner:
    return Planner(GOALS, {"prefill": Bounds(least, most), "decode": Bounds(least, most)}, **more)


def looks(plan: Planner, rate: float, fleet: Fleet, times: Iterable[float]) -> list[tuple[int, int]]:
    found = [plan.plan(load(rate), fleet, at) for at in times]
    return [(one.wanted("prefill"), one.wanted("decode")) for one in found]


def test_a_pool_grows_at_once_by_as_many_as_are_missing(fleet: Pools) -> None:
    found = planner().plan(load(300.0), fleet(), 0.0)
    assert found.wanted("prefill") > 8 and found.wanted("decode") > 4
    assert found.pools["prefill"].reason.startswith("grows from 1: prompts")
    assert 0 < found.predicted.ttft_s <= 0.5 and not found.unmet and not found.held


def test_a_pool_shrinks_only_when_the_load_was_low_for_long(fleet: Pools) -> None:
    plan = planner()
    (high,) = looks(plan, 300.0, fleet(), [0.0])
    assert set(looks(plan, 20.0, fleet(*high), range(5, 85, 5))) == {high}
    assert looks(plan, 300.0, fleet(*high), [85.0]) == [high]
    assert set(looks(plan, 20.0, fleet(*high), range(90, 170, 5))) == {high}, "the load came back meanwhile"
    (low,) = looks(plan, 20.0, fleet(*high), [180.0])
    assert low < high and plan.plan(load(20.0), fleet(*low), 185.0).wanted("prefill") == low[0]


def test_the_time_that_a_start_takes_is_waited_for(fleet: Pools) -> None:
    plan, slow = planner(), replace(fleet(9, 9), start_s={"prefill": 200.0, "decode": 30.0})
    looks(plan, 300.0, slow, [0.0])
    after = looks(plan, 20.0, slow, range(5, 150, 5))[-1]
    assert after[0] > 5 > after[1]


def test_a_load_at_the_edge_does_not_flap(fleet: Pools) -> None:
    """The load at which a worker more is needed, five per cent up and down each look."""
    plan, seen = planner(), []
    edge = next(rate for rate in range(20, 200) if planner().plan(load(rate), fleet(), 0.0).wanted("prefill") == 4)
    for look in range(80):
        found = plan.plan(load(edge * (0.95 if look % 2 else 1.0)), fleet(4, 2), 5.0 * look)
        seen.append(found.wanted("prefill"))
    assert set(seen) == {4}


def test_lost_heartbeats_change_nothing_and_shrink_nothing_soon_after(fleet: Pools) -> None:
    plan = planner()
    (high,) = looks(plan, 300.0, fleet(), [0.0])
    silent = fleet(*high, decode={"num_ready": 1, "num_silent": high[1] - 1})
    for at in range(5, 300, 5):
        found = plan.plan(load(0.0), silent, float(at))
        assert (found.wanted("prefill"), found.wanted("decode")) == high
    assert f"{high[1] - 1} of {high[1]} decode workers are silent" in found.held
    assert set(looks(plan, 0.0, fleet(*high), range(300, 385, 5))) == {high}


def test_one_silent_worker_of_many_holds_nothing_up(fleet: Pools) -> None:
    found = planner().plan(load(300.0), fleet(4, 9, decode={"num_ready": 9, "num_silent": 1}), 0.0)
    assert not found.held and found.wanted("prefill") > 8


def test_zero_after_the_idle_time_and_one_at_the_first_request(fleet: Pools) -> None:
    plan = planner(least=0, idle_s=300.0)
    looks(plan, 20.0, fleet(), [0.0])
    assert set(looks(plan, 0.0, fleet(), range(5, 295, 5))) == {(1, 1)}
    assert looks(plan, 0.0, fleet(), [305.0]) == [(0, 0)]
    waking = replace(fleet(0, 0), num_held={"prefill": 1, "decode": 1})
    found = plan.plan(load(0.0), waking, 310.0)
    assert (found.wanted("prefill"), found.wanted("decode")) == (1, 1)
    assert "1 requests have no decode worker" in found.pools["decode"].reason


def test_the_minimum_is_kept_without_any_load(fleet: Pools) -> None:
    assert looks(planner(least=2), 0.0, fleet(), [0.0, 900.0, 1800.0])[-1] == (2, 2)


def test_prompts_behind_a_full_decode_pool_grow_decode_alone(fleet: Pools) -> None:
    """Forty prompts a second come, and four hundred wait: for prefill, or for the decode pool, which is full."""

    def found(**decode: object) -> Plan:
        pools = fleet(2, 1, prefill={"num_waiting": 400}, decode=decode)
        return planner().plan(load(40.0), pools, 0.0)

    slow, full = found(num_held=40), found(num_held=128, num_waiting=300, is_full=True)
    by_load = planner().plan(load(40.0), fleet(2, 1), 0.0)
    assert slow.wanted("prefill") > full.wanted("prefill") == by_load.wanted("prefill")
    assert full.wanted("decode") > slow.wanted("decode")


def test_workers_that_find_no_machine_are_not_counted_on_and_do_not_freeze_the_plan(fleet: Pools) -> None:
    plan = planner(budget=Budget(14.0))
    stuck = fleet(3, 2, prefill={"num_ready": 3, "num_starting": 5, "num_unschedulable": 5})
    first = plan.plan(load(150.0), stuck, 0.0)
    again = plan.plan(load(300.0), stuck, 5.0)
    assert again.wanted("prefill") > first.wanted("prefill") > 3, "still asked for"
    assert again.wanted("decode") > first.wanted("decode"), "they take no budget from the others"
    assert "5 prefill workers are unschedulable" in again.unmet
    assert again.predicted.ttft_s > GOALS.ttft_s, "with the three that there are"


def test_goals_out_of_reach_and_bounds_are_named(fleet: Pools) -> None:
    plan = Planner(Goals(0.5, 0.005), {"prefill": Bounds(1, 2), "decode": Bounds(1, 40)})
    found = plan.plan(load(300.0), fleet(), 0.0)
    assert found.wanted("prefill") == 2
    assert (
        "cannot be met: a lone sequence takes" in found.unmet
        and "prefill workers are needed, but the maximum is 2" in found.unmet
    )


def test_nothing_measured_yet_changes_nothing(fleet: Pools) -> None:
    blank = {"kind": WorkerKind()}
    plan = planner(least=0)
    assert looks(
        plan, 300.0, fleet(2, 3, prefill=blank | {"num_ready": 2}, decode=blank | {"num_ready": 3}), [0.0]
    ) == [(2, 3)]
    assert planner(least=0).plan(OfferedLoad(5.0, 5.0), fleet(1, 1), 0.0).wanted("prefill") == 1, "no request has ended"


@pytest.mark.parametrize("waiting", [0, 200])
def test_the_running_requests_keep_their_workers(fleet: Pools, waiting: int) -> None:
    """Long streams go on after the last arrival."""
    plan = planner(least=0, idle_s=60.0)
    busy = fleet(1, 3, decode={"num_held": 300, "num_waiting": waiting})
    assert all(decode >= 3 for _, decode in looks(plan, 0.0, busy, range(0, 600, 20)))


# ---------------------------------------------------------------- workers that change their roles


def test_roles_change_within_a_sum_that_the_planner_keeps(fleet: Pools) -> None:
    """The split moves by one worker at each look, and the need of one pool at the cost of the other: nothing starts."""
    plan, homes = planner(), {"prefill": 3, "decode": 3}
    need = plan.plan(load(60.0), replace(fleet(3, 3), homes=homes), 0.0)
    assert need.pools["prefill"].needed + need.pools["decode"].needed <= 6
    for look in range(1, 15):
        now_prefill = (2, 4)[look % 2]
        found = plan.plan(load(60.0), replace(fleet(now_prefill, 6 - now_prefill), homes=homes), 5.0 * look)
        assert (found.wanted("prefill"), found.wanted("decode")) == (3, 3)


def test_the_sum_grows_when_roles_do_not_suffice_at_the_home_that_is_short(fleet: Pools) -> None:
    by_role = planner().plan(load(300.0), fleet(2, 2), 0.0)
    total = by_role.pools["prefill"].needed + by_role.pools["decode"].needed
    found = planner().plan(load(300.0), replace(fleet(1, 3), homes={"prefill": 2, "decode": 2}), 0.0)
    assert found.wanted("prefill") + found.wanted("decode") == total
    assert found.wanted("prefill") == by_role.pools["prefill"].needed
    assert "workers with changing roles" in found.pools["prefill"].reason


def test_the_sum_takes_the_other_home_where_one_is_at_its_bound(fleet: Pools) -> None:
    homes = {"prefill": 2, "decode": 2}
    plan = Planner(GOALS, {"prefill": Bounds(0, 3), "decode": Bounds(1, 40)})
    found = plan.plan(load(300.0), replace(fleet(2, 2), homes=homes), 0.0)
    free = planner().plan(load(300.0), replace(fleet(2, 2), homes=homes), 0.0)
    assert found.wanted("prefill") == 3
    assert found.wanted("decode") == free.wanted("prefill") + free.wanted("decode") - 3 and not found.unmet


def test_the_sum_shrinks_when_it_was_too_large_for_long(fleet: Pools) -> None:
    plan, pools = planner(), replace(fleet(6, 6), homes={"prefill": 6, "decode": 6})
    first = plan.plan(load(20.0), pools, 0.0)
    assert (first.wanted("prefill"), first.wanted("decode")) == (6, 6)
    for at in range(5, 200, 5):
        last = plan.plan(load(20.0), pools, float(at))
    assert last.wanted("prefill") + last.wanted("decode") < 6
    pinned = replace(pools, homes={})
    assert plan.plan(load(20.0), pinned, 205.0).wanted("decode") == last.wanted("decode"), "not to nothing at once"


def test_a_budget_moves_with_the_load_from_one_model_to_another(fleet: Pools) -> None:
    """The model whose load falls gives workers up when its needs were low for long; then the other one grows."""
    budget, most = Budget(12.0), 40
    bounds: dict[Role, Bounds] = {"prefill": Bounds(0, most), "decode": Bounds(1, most)}
    planners = {model: Planner(GOALS, bounds, budget=budget, model=model) for model in ("a", "b")}
    present: dict[str, dict[str, int]] = {model: {"prefill": 1, "decode": 1} for model in planners}
    history = []
    for now in range(0, 1200, 5):
        rates = {"a": 200.0, "b": 20.0} if now < 400 else {"a": 20.0, "b": 200.0}
        for model, planner in planners.items():
            nums = present[model]
            plan = planner.plan(load(rates[model]), fleet(nums["prefill"], nums["decode"]), float(now))
            present[model] = {role: pool.wanted for role, pool in plan.pools.items()}
        history.append({model: sum(nums.values()) for model, nums in present.items()})
        assert sum(history[-1].values()) <= 12 or not now, (
            "b, which is heard last, has its part in the first look already"
        )
    assert history[75]["a"] > 2 * history[75]["b"] and history[-1]["b"] > 2 * history[-1]["a"]
    for model in planners:
        changes = [later[model] - before[model] for before, later in zip(history[1:], history[2:], strict=False)]
        directions = [change > 0 for change in changes if change]
        assert sum(one is not other for one, other in itertools.pairwise(directions)) <= 1, (
            "it grows once, or shrinks once"
        )
    assert "the budget is 12" in plan.unmet


def test_after_a_start_neither_bounds_nor_budget_make_a_pool_smaller(fleet: Pools) -> None:
    plan = planner(most=6, budget=Budget(8.0))
    assert looks(plan, 20.0, fleet(9, 7), range(0, 85, 5))[-1] == (9, 7)
    last = looks(plan, 20.0, fleet(9, 7), range(85, 120, 5))[-1]
    assert sum(last) <= 8


def test_a_size_that_another_party_sets_is_kept_for_the_hold_time(fleet: Pools) -> None:
    plan = planner()
    for now in range(0, 200, 5):
        sizes = {"prefill": 3, "decode": 2} if now < 100 else {"prefill": 9, "decode": 2}
        found = plan.plan(load(20.0), replace(fleet(3, 2), replicas=sizes), float(now))
        assert now < 100 or now >= 190 or found.wanted("prefill") == 9
    assert found.wanted("prefill") < 9
