"""How many workers a load needs, and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from common.latency.step_model import StepModel
from router.planner.offered_load import OfferedLoad, SampledRequest
from router.planner.pool import Fleet, Goals, PoolState, WorkerKind
from router.planner.sizing import predict, size

GOALS = Goals(0.5, 0.025, 0.95)
CHAT = tuple(SampledRequest(200 * (i % 8 + 1), 0, 40 * (i % 6 + 1)) for i in range(24))
Pools = Callable[..., Fleet]


def load(rate: float, requests: tuple[SampledRequest, ...] = CHAT) -> OfferedLoad:
    return OfferedLoad(rate, rate, 1.0, requests)


def test_nothing_is_needed_for_nothing(fleet: Pools) -> None:
    needs = size(load(0.0), fleet(), GOALS)
    assert (needs["prefill"].num, needs["decode"].num) == (0, 0)


def test_needs_grow_with_the_load_and_say_what_binds(fleet: Pools) -> None:
    nums = [size(load(rate), fleet(), GOALS) for rate in (2.0, 20.0, 80.0, 300.0)]
    for role in ("prefill", "decode"):
        counts = [needs[role].num for needs in nums]
        assert counts == sorted(counts) and counts[0] == 1 and counts[-1] > 4
    assert "prompts" in nums[-1]["prefill"].binds
    assert "with" in nums[-1]["decode"].binds and not nums[-1]["decode"].impossible


@pytest.mark.parametrize("rate", [5.0, 40.0, 150.0])
def test_what_is_needed_keeps_the_goals_and_one_fewer_does_not(fleet: Pools, rate: float) -> None:
    needs = size(load(rate), fleet(), GOALS)
    nums = {role: need.num for role, need in needs.items()}
    kept = predict(load(rate), fleet(), nums, GOALS)
    assert kept.ttft_s <= GOALS.ttft_s and kept.tpot_s <= GOALS.tpot_s
    fewer = size(load(rate), fleet(), replace(GOALS, ttft_s=kept.ttft_s * 1.001))
    assert fewer["prefill"].num == nums["prefill"]


@pytest.mark.parametrize(
    ("change", "binds"),
    [({"num_blocks": 900}, "KV blocks"), ({"max_num_seqs": 8}, "batch slots"), ({}, "decode steps")],
)
def test_decode_is_bound_by_blocks_places_or_steps(fleet: Pools, change: dict[str, int], binds: str) -> None:
    pools = dict(fleet().pools)
    kind = replace(pools["decode"].kind, **({"max_num_seqs": 4096, "num_blocks": 1 << 20} | change))
    pools["decode"] = replace(pools["decode"], kind=kind)
    need = size(load(60.0), Fleet(pools), Goals(0.5, 0.014, 0.95))["decode"]
    assert need.num > 1 and need.binds.startswith(binds)


def test_a_goal_that_no_number_of_workers_meets_is_named_and_does_not_grow_the_pool(fleet: Pools) -> None:
    within, beyond = (size(load(5.0), fleet(), Goals(0.5, tpot_s, 0.95))["decode"] for tpot_s in (0.02, 0.005))
    assert beyond.num <= within.num + 1
    assert "TPOT of 5 ms at p95 cannot be met: a lone sequence takes 12 ms at best" in beyond.impossible
    slow = size(load(5.0), fleet(), Goals(0.05, 0.02, 0.95))["prefill"]
    assert "prompts without any wait take" in slow.impossible and slow.num <= 3


def test_short_prompts_are_the_decode_pools(fleet: Pools) -> None:
    short = tuple(SampledRequest(400, 390, 50) for _ in range(8))
    needs = size(load(20.0, short), fleet(), GOALS)
    assert (needs["prefill"].num, needs["decode"].num) == (0, 1)
    assert predict(load(20.0, short), fleet(), {"prefill": 0, "decode": 1}, GOALS).ttft_s > 0


def test_one_pool_computes_everything(kinds: dict[str, WorkerKind]) -> None:
    alone = Fleet({"decode": PoolState(kinds["decode"], num_ready=1)})
    needs = size(load(30.0), alone, GOALS)
    assert list(needs) == ["decode"] and needs["decode"].num > 1


def test_cached_prompts_need_fewer_workers(fleet: Pools) -> None:
    cached = tuple(replace(one, num_cached=one.num_prompt * 3 // 4) for one in CHAT)
    assert size(load(80.0, cached), fleet(), GOALS)["prefill"].num < size(load(80.0), fleet(), GOALS)["prefill"].num


def test_a_model_that_errs_is_planned_with_room(fleet: Pools) -> None:
    pools = dict(fleet().pools)
    unsure = StepModel(
        **{**{f: getattr(pools["prefill"].kind.model, f) for f in StepModel.__struct_fields__}, "error": 0.3}
    )
    pools["prefill"] = replace(pools["prefill"], kind=replace(pools["prefill"].kind, model=unsure))
    assert size(load(80.0), Fleet(pools), GOALS)["prefill"].num > size(load(80.0), fleet(), GOALS)["prefill"].num
