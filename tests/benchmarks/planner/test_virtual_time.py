"""The planner over two pools in virtual time, against the marks of a clairvoyant and simpler rules."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.planner.loads import BOUNDS, GOALS, KINDS, conversation, sine
from benchmarks.planner.rules import Clairvoyant, Planned, Seeing, Utilisation
from benchmarks.planner.world import Controller, Result, World, poisson
from router.planner.budget import Budget
from router.planner.planner import Planner
from router.planner.pool import Bounds, Fleet, PoolState

Rate = Callable[[float], float]


def served(rate: Rate, seconds: float, controller: Controller, **world: Any) -> Result:
    start = world.pop("start", {"prefill": 1, "decode": 1})
    return World(poisson(rate, seconds, conversation), KINDS, GOALS, controller, start=start, **world).run(seconds)


def test_a_sine_is_followed_at_about_the_cost_of_one_who_knows_it() -> None:
    rate, sample = sine(3.0, 24.0, 600.0), tuple(one.shape for one in poisson(lambda at: 10.0, 30.0, conversation, 9))
    starts = {"prefill": 30.0, "decode": 30.0}
    known = Fleet({role: PoolState(kind) for role, kind in KINDS.items()}, 64, starts)  # type: ignore[arg-type]
    best = served(rate, 600.0, Clairvoyant(rate, sample, GOALS, BOUNDS, known))  # the first start is late for it, too
    found = served(rate, 600.0, Planned(Planner(GOALS, BOUNDS)))
    assert found.met >= 0.95 and found.met >= best.met - 0.02
    assert found.cost <= 1.35 * best.cost
    assert found.turns("prefill") <= 2 and found.turns("decode") <= 2
    assert found.changes("prefill") <= 8


@pytest.mark.slow
def test_a_steady_load_changes_no_pool() -> None:
    found = served(lambda at: 14.0, 500.0, Planned(Planner(GOALS, BOUNDS)), start={"prefill": 2, "decode": 1})
    assert found.met >= 0.95 and found.changes("prefill") + found.changes("decode") <= 1


@pytest.mark.slow
def test_a_burst_with_slow_starts_is_served_sooner_than_by_utilisation() -> None:
    rate: Rate = lambda at: 30.0 if 120.0 <= at < 420.0 else 6.0  # noqa: E731
    start = {"prefill": 1, "decode": 1}
    planned, used = (
        served(rate, 480.0, controller, start_s=90.0, start=start)
        for controller in (Planned(Planner(GOALS, BOUNDS)), Utilisation(BOUNDS))
    )
    assert planned.met > used.met
    assert planned.turns("prefill") <= 2


@pytest.mark.slow
def test_a_sudden_burst_is_served_as_well_as_by_one_who_sees_it_at_once() -> None:
    rate: Rate = lambda at: 32.0 if 120.0 <= at < 240.0 else 8.0  # noqa: E731
    sample = tuple(conversation(chance) for chance in [random.Random(7)] for _ in range(400))
    known = Fleet({role: PoolState(kind) for role, kind in KINDS.items()}, 64, {"prefill": 30.0, "decode": 30.0})
    seeing = Seeing(Clairvoyant(rate, sample, GOALS, BOUNDS, known), late_s=5.0)
    found, best = (served(rate, 300.0, controller) for controller in (Planned(Planner(GOALS, BOUNDS)), seeing))
    assert found.met >= best.met - 0.01


@pytest.mark.slow
def test_an_idle_pool_ends_and_wakes() -> None:
    bounds = {"prefill": Bounds(0, 20), "decode": Bounds(0, 20)}
    rate: Rate = lambda at: 6.0 if at < 60.0 or at >= 560.0 else 0.0  # noqa: E731
    planned = Planned(Planner(GOALS, bounds, idle_s=120.0))
    found = served(rate, 680.0, planned, start_s=10.0)
    assert {"prefill": 0, "decode": 0} in found.history
    assert found.history[-1]["decode"] >= 1
    assert found.turns("decode") <= 2 and found.worker_s["decode"] < 480.0


@pytest.mark.slow
def test_lost_data_in_the_middle_of_a_load_shrinks_nothing() -> None:
    planned = Planned(Planner(GOALS, BOUNDS))
    found = served(lambda at: 20.0, 400.0, planned, silent=[(150.0, 350.0)], start={"prefill": 2, "decode": 2})
    held = [wanted for wanted, plan in zip(found.history, planned.plans, strict=True) if plan.held]
    assert len(held) == 40 and all(wanted == held[0] for wanted in held)


@pytest.mark.slow
@pytest.mark.parametrize("stuck", ["prefill", "decode"])
def test_workers_that_never_come_leave_the_other_pool_alone(stuck: str) -> None:
    planned = Planned(Planner(GOALS, BOUNDS, budget=Budget(12.0)))
    found = served(lambda at: 44.0, 150.0, planned, most={stuck: 1})
    assert (found.history[-1]["decode"] >= 2) if stuck == "prefill" else (found.history[-1]["prefill"] >= 3)
    assert planned.plans[-1].unmet
    assert found.turns(stuck) <= 2  # type: ignore[arg-type]
