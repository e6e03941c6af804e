"""Which split is predicted to miss least, and what the whole loop makes of it in virtual time."""

from __future__ import annotations

import pytest

from router.planner.load.load import OfferedLoad, SampledRequest
from router.planner.sizing.pool import Fleet, Goals, PoolState, WorkerKind
from router.planner.sizing.split import Splits, UnderWay

from .split_world import DECODE, PREFILL, World

FLEET = Fleet(
    {
        "prefill": PoolState(WorkerKind(PREFILL, num_blocks=4000, max_num_seqs=64, step_tokens=512)),
        "decode": PoolState(WorkerKind(DECODE, num_blocks=4000, max_num_seqs=64, step_tokens=128)),
    }
)
PROMPTS = OfferedLoad(2.8, 2.8, 1.0, (SampledRequest(4000, 0, 32),) * 8)
ANSWERS = OfferedLoad(3.6, 3.6, 1.0, (SampledRequest(100, 0, 200),) * 8)
LONG_PROMPTS, LONG_ANSWERS = [(2.8, 4000, 32)], [(3.6, 100, 200)]


NOTHING = UnderWay()


def missed(load: OfferedLoad, running: UnderWay = NOTHING, ttft_s: float = 4.0, tpot_s: float = 0.07) -> list[float]:
    """By number of prefill workers, of four workers, in ten seconds."""
    splits = Splits(load, FLEET, Goals(ttft_s, tpot_s), running, 10.0)
    return [splits.num_missed(num, 4 - num) for num in range(4)]


def best(found: list[float]) -> int:
    return min(range(len(found)), key=found.__getitem__)


def test_long_prompts_want_prefill_workers_and_long_answers_decode_workers() -> None:
    prompts, answers = missed(PROMPTS), missed(ANSWERS)
    assert best(prompts) == 3 and prompts[3] < 0.5 and prompts[1] > 10
    assert answers[1] < answers[2] < answers[3] and answers[3] > 20


def test_prompts_that_wait_already_count_against_few_workers() -> None:
    assert missed(PROMPTS, UnderWay(waiting_s=6.0))[2] > missed(PROMPTS)[2] + 5
    assert missed(PROMPTS, UnderWay(waiting_s=6.0))[3] < 0.5


def test_answers_that_run_keep_their_workers_until_they_have_ended() -> None:
    """Long prompts begin to come while long answers still run: first two workers change, the third one later."""

    def then(num: int, waiting_s: float) -> int:
        return best(missed(PROMPTS, UnderWay(waiting_s, num, context=250.0, tokens_left=100.0, num_decode=3)))

    assert [then(45, 0.0), then(30, 4.0), then(15, 6.0)] == [1, 2, 3]


def test_goals_that_nothing_meets_still_tell_a_better_split() -> None:
    assert best(missed(PROMPTS, ttft_s=0.1)) == 3
    assert missed(ANSWERS, tpot_s=0.01)[1] < missed(ANSWERS, tpot_s=0.01)[3]


def test_both_pools_short_is_shared() -> None:
    """Each pool alone would need all four workers."""
    load = OfferedLoad(6.0, 6.0, 1.0, (SampledRequest(4000, 0, 32), SampledRequest(100, 0, 200)) * 4)
    found = missed(load)
    assert best(found) in (1, 2) and found[best(found)] > 20


# ---------------------------------------------------------------- the loop, in virtual time


def test_it_jumps_by_several_workers_at_once() -> None:
    world = World(3, 1)
    world.run(8.0, LONG_ANSWERS)
    assert len(world.orders) >= 2 and len({at for at, _, _ in world.orders[:2]}) == 1
    assert all(order.role == "decode" for _, _, order in world.orders)
    assert "would miss a goal with 3 prefill and 1 decode workers" in world.orders[0][2].reason


@pytest.mark.slow
def test_an_alternating_load_is_served_better_than_by_any_fixed_split() -> None:
    def served(world: World) -> int:
        for number in range(2):
            world.run(40.0, (LONG_PROMPTS, LONG_ANSWERS)[number % 2], 21 + number)
        return world.met()

    fixed = max(served(World(num, 4 - num, role_change=False)) for num in (1, 2, 3))
    assert served(World(2, 2)) > 1.1 * fixed


@pytest.mark.slow
@pytest.mark.parametrize("load", [LONG_PROMPTS, LONG_ANSWERS, [(0.5, 4000, 32), (0.6, 100, 200)]])
def test_a_steady_load_settles(load: list[tuple[float, int, int]]) -> None:
    world = World(2, 2)
    world.run(40.0, load, seed=2)
    assert len(world.orders) <= 2


@pytest.mark.slow
def test_a_load_that_swings_faster_than_a_change_pays_costs_little() -> None:
    def served(world: World) -> int:
        for number in range(24):
            world.run(5.0, (LONG_PROMPTS, LONG_ANSWERS)[number % 2], 1 + number)
        return world.met()

    changing = World(2, 2)
    assert served(changing) > 0.85 * served(World(2, 2, role_change=False))
    assert len(changing.orders) <= 12


@pytest.mark.parametrize(("load", "least"), [(LONG_PROMPTS, (1, 2)), (LONG_ANSWERS, (2, 1))])
def test_pools_keep_their_least_numbers(load: list[tuple[float, int, int]], least: tuple[int, int]) -> None:
    world = World(2, 2, min_prefill=least[0], min_decode=least[1])
    world.run(20.0, load)
    assert world.orders == []


def test_nothing_changes_while_half_of_a_pool_is_silent() -> None:
    world = World(2, 2)
    world.silent = {"d1"}
    world.run(4.0, [])
    world.run(10.0, LONG_PROMPTS)
    assert not any("would miss" in order.reason for _, _, order in world.orders)


def test_without_data_or_goals_nothing_is_forecast() -> None:
    world = World(2, 2)
    world.run(3.0, [])
    assert world.forecaster.forecast(world.registry.workers.values(), 0, 0, 3, world.now) is None
    config = World(2, 2, ttft_ms=0.0, tpot_ms=0.0).config
    assert type(world.forecaster).of(config) is None and type(world.forecaster).of(world.config) is not None
