"""Rules after those of other planners, on pools whose needs are known by hand."""

from __future__ import annotations

from typing import Any

from benchmarks.planner.loads import BOUNDS, GOALS, KINDS
from benchmarks.planner.rules import Clairvoyant, Interpolating, Saturation, Seeing
from benchmarks.planner.world import Request, Seen
from common.latency.step_model import StepShape
from router.planner.offered_load import SampledRequest
from router.planner.pool import Fleet, PoolState

SHAPE = SampledRequest(2000, 0, 101)
MODEL = KINDS["decode"].model


def seen(now: float, *, num: int = 2, arrived: int = 0, ended: Any = (), kv: float = 0.0, **pool: Any) -> Seen:
    pools = {role: PoolState(kind, num_ready=num, **pool) for role, kind in KINDS.items()}
    nums = {role: num + pool.get("num_starting", 0) for role in KINDS}
    none = dict.fromkeys(KINDS, 0.0)
    return Seen(now, Fleet(pools), arrived, ended, (), none, nums, dict.fromkeys(KINDS, kv))  # type: ignore[arg-type]


def ended(num: int, ttft_s: float, tpot_s: float) -> list[Request]:
    return [Request(0.0, SHAPE, ttft_s=ttft_s, tpot_s=tpot_s) for _ in range(num)]


def test_one_without_foresight_orders_for_the_rate_that_it_has_seen() -> None:
    fleet = Fleet({role: PoolState(kind) for role, kind in KINDS.items()}, 64, {"prefill": 30.0, "decode": 30.0})
    known = Clairvoyant(lambda at: 32.0 if at >= 100.0 else 8.0, (SHAPE,), GOALS, BOUNDS, fleet)
    late = Seeing(known, late_s=5.0)
    few, many = known.needed(0.0), known.needed(100.0)
    assert many["prefill"] > few["prefill"]
    assert Seeing(known)(seen(95.0)) == late(seen(100.0)) == few
    assert Seeing(known)(seen(100.0)) == late(seen(105.0)) == many == known(seen(70.0))


def test_throughput_is_divided_by_that_of_a_profiled_worker() -> None:
    """3,600 requests in 180 s are 20 a second; a prompt takes 94 ms alone, so two workers compute 21 a second."""
    rule = Interpolating(GOALS, BOUNDS)
    alone_s = MODEL.steps_s(StepShape.of_prompt(0, 2000), 2048)
    assert rule(seen(90.0, arrived=1800)) == {"prefill": 2, "decode": 2}
    step_s = MODEL.seconds(StepShape.of_rows(14, round(14 * 2050.5)))
    found = rule(seen(180.0, arrived=1800, ended=ended(50, 2 * alone_s, step_s)))
    assert 0.09 < alone_s < 0.1
    assert found["prefill"] == 2
    assert found["decode"] == 1


def test_tokens_slower_than_expected_ask_for_more_decode_workers() -> None:
    """100 answers a second: each worker has 60 rows, whose step should take 17 ms."""
    slow = Interpolating(GOALS, BOUNDS)(seen(180.0, arrived=18_000, ended=ended(50, 0.2, 0.05)))
    fast = Interpolating(GOALS, BOUNDS)(seen(180.0, arrived=18_000, ended=ended(50, 0.2, 0.013)))
    assert slow["decode"] > fast["decode"]


def test_without_requests_nothing_changes() -> None:
    assert Interpolating(GOALS, BOUNDS)(seen(180.0, num=5)) == {"prefill": 5, "decode": 5}


def test_a_saturated_pool_grows_by_one_unless_one_is_pending() -> None:
    assert Saturation(BOUNDS)(seen(60.0, kv=0.75))["decode"] == 3
    assert Saturation(BOUNDS)(seen(60.0, num_waiting=6))["prefill"] == 3
    assert Saturation(BOUNDS)(seen(60.0, kv=0.75, num_starting=1))["decode"] == 3


def test_a_pool_shrinks_only_while_the_rest_would_hold_the_load() -> None:
    assert Saturation(BOUNDS)(seen(60.0, kv=0.2))["decode"] == 1
    assert Saturation(BOUNDS)(seen(60.0, kv=0.4))["decode"] == 2
    assert Saturation(BOUNDS)(seen(60.0, num=1, kv=0.0))["decode"] == 1


def test_it_looks_once_a_minute() -> None:
    rule = Saturation(BOUNDS)
    rule(seen(60.0, kv=0.5))
    assert rule(seen(65.0, kv=0.9))["decode"] == 2
    assert rule(seen(120.0, kv=0.9))["decode"] == 3
