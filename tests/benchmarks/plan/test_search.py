"""A search finds what simulating every candidate finds, with fewer simulations."""

from __future__ import annotations

import random
from typing import Any

import pytest

from benchmarks.plan.candidate import Candidate, Flags, every
from benchmarks.plan.outlook import Outlook
from benchmarks.plan.search import Search
from benchmarks.plan.trials import Trials
from benchmarks.simulator.world.scenario import Scenario

from .conftest import make_spec, search_of


def staircase(source: random.Random) -> tuple[dict[tuple[int, int], bool], float, float]:
    """Which pools suffice: a random border that more workers of a kind never cross backwards, and two prices."""
    border, least = {}, source.randint(2, 9)
    for num_prefill in range(1, 11):
        least = max(1, least - source.randint(0, 2))
        border[num_prefill] = least
    alone = source.randint(3, 12)
    suffices = {(p, d): d >= border[p] for p in range(1, 11) for d in range(1, 11)}
    suffices |= {(0, d): d >= alone for d in range(1, 11)}
    return suffices, source.choice((0.5, 1.0, 2.5)), source.choice((1.0, 1.7))


@pytest.mark.parametrize("number", range(12))
def test_the_pick_costs_what_the_best_of_all_costs(number: int) -> None:
    source = random.Random(number)
    suffices, prefill_price, decode_price = staircase(source)
    spec = make_spec(
        prefill={"price": prefill_price},
        decode={"price": decode_price},
        bounds={"max_workers": 10},
        search={"seeds": 3},
    )

    def attained(p: int, d: int, flags: Flags, made: Scenario) -> float:
        return 0.98 if suffices[p, d] else 0.6

    searching, judging = (
        search_of(spec, attained, lambda candidate: (candidate.num_decode * 7 + candidate.num_prefill) % 5 / 2)
        for _ in range(2)
    )
    pick, best = searching.best(), judging.exhaustive()
    assert best is not None and pick is not None
    assert pick.candidate.cost(spec) == best.candidate.cost(spec)
    assert searching.meets(pick) and searching.is_settled(pick)
    assert searching.trials.num_run < judging.trials.num_run / 2


def test_without_a_candidate_that_meets_the_goals_the_largest_decide() -> None:
    spec = make_spec(bounds={"max_workers": 8})
    search = search_of(spec, lambda p, d, flags, made: 0.1 + 0.05 * d, lambda candidate: 2.0)
    assert search.best() is None
    largest = {(p, 8 - p) for p in range(8)}
    assert {(one.candidate.num_prefill, one.candidate.num_decode) for one in search.ranked()} == largest


def test_one_pool_is_picked_where_it_is_cheaper_and_two_are_shown_beside_it() -> None:
    search = search_of(make_spec(), lambda p, d, flags, made: 0.99 if (p == 0 and d >= 1) or p * d >= 2 else 0.2)
    pick = search.best()
    assert pick is not None and pick.candidate.shape == "one pool of 1"
    assert any(search.meets(one) and not one.candidate.is_one_pool for one in search.ranked())


@pytest.mark.slow
def test_a_flag_that_saves_a_worker_is_found() -> None:
    spec = make_spec(
        search={"local_prefill_threshold": [64, 512], "max_num_seqs": [64, 128]}, bounds={"max_workers": 6}
    )

    def attained(p: int, d: int, flags: Flags, made: Scenario) -> float:
        workers = p + d + (flags.local_prefill_threshold == 512) * (p > 0) + (flags.max_num_seqs == 128) * 0.5
        return 0.5 + 0.1 * workers if p else 0.3

    pick = search_of(spec, attained).best()
    assert pick is not None  # 0.95 takes 4.5 workers: the first flag counts as one, the second as half of one
    assert pick.candidate.num_prefill + pick.candidate.num_decode == 3
    assert pick.candidate.flags.changes(every(spec)[0].flags) == "--local-prefill-threshold 512 --max-num-seqs 128"


def test_a_candidate_near_the_quantile_gets_all_its_seeds_and_one_far_below_only_one() -> None:
    spec = make_spec(search={"seeds": 5})
    search = search_of(spec, lambda p, d, flags, made: 0.95 + 0.02 * (made.seed % 2) if p else 0.5)
    near, far = search.judge([Candidate(1, 1, every(spec)[0].flags), Candidate(0, 1, every(spec)[0].flags)])
    assert (len(near.trials), len(far.trials)) == (5, 1)


LOADS: dict[str, dict[str, Any]] = {
    "two pools": {"load": {"rate": 6.0, "input_len": "800-2500", "output_len": "10-60"}, "goals": {"ttft_ms": 300.0}},
    "one pool": {"load": {"rate": 3.0, "input_len": "20-100", "output_len": "10-40"}},
    "many tokens": {
        "load": {"rate": 4.0, "input_len": "20-100", "output_len": "100-200"},
        "goals": {"tpot_ms": 12.2, "ttft_ms": 300.0},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("load", LOADS)
def test_the_pick_of_real_simulations_is_that_of_an_exhaustive_sweep(load: str) -> None:
    spec = make_spec(**LOADS[load], bounds={"max_workers": 3}, duration_s=4.0)
    with Trials(spec) as few, Trials(spec) as all_of_them:
        outlook = Outlook(spec)
        pick, best = Search(few, outlook).best(), Search(all_of_them, outlook).exhaustive()
        assert pick is not None and best is not None
        assert pick.candidate.cost(spec) <= 1.05 * best.candidate.cost(spec)
        assert few.num_run <= all_of_them.num_run
    assert all(outlook.can_hold(one.candidate) for one in all_of_them.all_evidence() if one.attainment >= 0.95)
    assert pick.candidate.is_one_pool == (load != "two pools")
