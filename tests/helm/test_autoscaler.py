"""The triggers that the chart renders, under a KEDA and HPA in virtual time: a steady load gets a steady pool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from router.planner.planner import Planner
from router.planner.pool import Bounds, Goals

from .autoscaler import Follower, PrefillPools, Scaler
from .chart import render


def spec(**over: Any) -> dict[str, Any]:
    trigger = {
        "type": "metrics-api",
        "name": "load",
        "metadata": {
            "format": "prometheus",
            "valueLocation": 'load{role="prefill",model_name="m"}',
            "targetValue": "0.5",
            "activationTargetValue": "0",
        },
    }
    behavior = {
        "scaleUp": {
            "stabilizationWindowSeconds": 0,
            "policies": [{"type": "Pods", "value": 2, "periodSeconds": 10}],
        },
        "scaleDown": {
            "stabilizationWindowSeconds": 60,
            "policies": [{"type": "Pods", "value": 1, "periodSeconds": 10}],
        },
    }
    base = {"minReplicaCount": 0, "maxReplicaCount": 5, "cooldownPeriod": 100, "triggers": [trigger]}
    return base | {"advanced": {"horizontalPodAutoscalerConfig": {"behavior": behavior}}} | over


def page(value: float) -> str:
    return f'load{{role="decode",model_name="m"}} 99\nload{{model_name="m",role="prefill"}} {value}\n'


def test_from_zero_up_within_the_speed_limit_and_the_bounds() -> None:
    scaler = Scaler(spec())
    assert [scaler.step(page(0), 0), scaler.step(page(3), 1)] == [0, 1]
    assert [scaler.step(page(3), at) for at in (2, 12, 23, 34)] == [2, 4, 5, 5]


def test_down_slowly_after_the_window_and_to_zero_after_the_cooldown() -> None:
    scaler = Scaler(spec(), replicas=4)
    assert scaler.step(page(2), 0) == 4
    assert scaler.step(page(0.6), 30) == 4, "four were wanted within the window"
    assert [scaler.step(page(0.6), at) for at in (61, 65, 72, 83)] == [3, 3, 2, 2]
    assert [scaler.step(page(0), at) for at in (150, 182, 184)] == [1, 1, 0]
    assert scaler.turns() == 0


def test_near_the_target_and_without_a_metric_nothing_changes() -> None:
    scaler = Scaler(spec(), replicas=3)
    assert scaler.step(page(1.6), 0) == 3
    assert scaler.step("other 1\n", 1) == 3


# ---------------------------------------------------------------- the chart's triggers

MOST = 16
GOAL_S, SHARE = 1.0, 0.95
"""The goal of the time to first token, and the share of prompts that should meet it."""
NEEDED = {1.3: 2, 6.0: 7}
"""The fewest pods of speed 1 that meet the goal, by load."""
KEDA = {"type": "keda", "kedaTrigger": "metrics-api", "maxReplicas": MOST}


@pytest.fixture(scope="module")
def rendered(helm4: Path) -> dict[str, dict[str, Any]]:
    """The prefill pool's ScaledObject by signal."""
    found = {}
    for signal in ("load", "plan"):
        over = {
            "workers": {"autoscaling": KEDA | {"signal": signal}},
            "router": {"settings": {"planner": "advice"}, "replicas": 1},
        }
        items = render(helm4, over=over).of("ScaledObject")
        found[signal] = next(item["spec"] for item in items if "prefill" in item["metadata"]["name"])
    return found


def follower(rendered: dict[str, dict[str, Any]], signal: str, replicas: int = 1) -> Follower:
    bounds = {"prefill": Bounds(1, MOST), "decode": Bounds(1, 200)}
    plan = Planner(Goals(GOAL_S, 0.0, SHARE), bounds) if signal == "plan" else None  # type: ignore[arg-type]
    return Follower(Scaler(rendered[signal], replicas), plan)


def fixed(num: int) -> Follower:
    """A pool of a fixed size."""
    return Follower(Scaler(spec(minReplicaCount=num, maxReplicaCount=num), num))


@pytest.mark.slow
@pytest.mark.parametrize("load", NEEDED)
def test_what_a_steady_load_needs(load: float) -> None:
    enough, too_few = (
        PrefillPools(lambda at: load, [fixed(num)], 30.0).run(3600.0).ttft_at(SHARE)
        for num in (NEEDED[load], NEEDED[load] - 1)
    )
    assert enough <= GOAL_S < too_few


@pytest.mark.helm
@pytest.mark.parametrize(
    ("signal", "load", "start_s"),
    [
        ("load", 1.3, 120.0),
        pytest.param("load", 1.3, 30.0, marks=pytest.mark.slow),
        pytest.param("load", 6.0, 120.0, marks=pytest.mark.slow),
        pytest.param("plan", 1.3, 120.0, marks=pytest.mark.slow),
        pytest.param("plan", 6.0, 120.0, marks=pytest.mark.slow),
    ],
)
def test_a_steady_load_gets_the_pods_that_it_needs(
    rendered: dict[str, dict[str, Any]], signal: str, load: float, start_s: float
) -> None:
    """The plan may take a chance rise for a real one, once in two hours."""
    pool = PrefillPools(lambda at: load, [follower(rendered, signal)], start_s).run(7200.0)
    assert NEEDED[load] <= pool.mean <= 1.2 * NEEDED[load]
    assert pool.turns <= (0 if signal == "load" else 2)
    assert pool.ttft_at(SHARE) <= GOAL_S


@pytest.mark.helm
@pytest.mark.slow
def test_a_pool_turns_no_more_often_than_the_load(rendered: dict[str, dict[str, Any]]) -> None:
    load = lambda at: 1.3 if at // 3600 % 2 == 0 else 4.0  # noqa: E731
    pool = PrefillPools(load, [follower(rendered, "load")], 120.0).run(4 * 3600.0)
    assert pool.turns <= 3, "the load changes three times"
    assert max(pool.sizes) <= 10, "as many as compute in a minute what came while they started"
    assert pool.sizes[-1] in (5, 6)


@pytest.mark.helm
@pytest.mark.slow
def test_two_pools_of_different_speeds_are_each_scaled_for_their_part(rendered: dict[str, dict[str, Any]]) -> None:
    """Each pool has its own signal, in units of its own workers; the router divides the prompts between them."""
    both = [follower(rendered, "load") for _ in range(2)]
    pools = PrefillPools(lambda at: 6.0, both, 120.0, speeds=(1.0, 2.0)).run(7200.0)
    speed = both[0].scaler.replicas + 2.0 * both[1].scaler.replicas
    assert 7.0 <= speed <= 1.3 * 7.0 and pools.turns <= 1
    assert pools.ttft_at(SHARE) <= GOAL_S
