"""The search for the highest rate, on servers whose capacity is known."""

import math
import random

import pytest

from benchmarks.load.find_rate import RateSearch, Trial, is_lost, judge, num_independent, wilson


def queue_outcomes(rate: float, num: int, seed: int, *, service_s: float = 0.1, goal_s: float = 1.0) -> list[bool]:
    """Which of the requests of one server, first come first served with fixed service times, end within the goal."""
    source = random.Random(f"{rate}/{seed}")
    now, free_at, outcomes = 0.0, 0.0, []
    for _ in range(num):
        now += source.expovariate(rate)
        free_at = max(now, free_at) + service_s
        outcomes.append(free_at - now <= goal_s)
    return outcomes


def test_wilson_is_the_published_interval() -> None:
    assert wilson(0.95, 100) == pytest.approx((0.8882, 0.9785), abs=1e-4)
    assert wilson(1.0, 20)[0] == pytest.approx(0.8389, abs=1e-4)
    assert wilson(0.5, 0) == (0.0, 1.0)


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    source, covered = random.Random(1), 0
    for _ in range(400):
        verdict = judge([source.random() < 0.9 for _ in range(200)], 0.9)
        covered += verdict.low <= 0.9 <= verdict.high
    assert covered >= 0.93 * 400


def test_requests_that_miss_together_count_for_less() -> None:
    together = [number // 20 % 10 != 3 for number in range(400)]
    apart = [number % 10 != 3 for number in range(400)]
    assert num_independent(apart) == 400
    assert num_independent(together) < 100
    assert judge(apart, 0.95).is_sure and not judge(together, 0.95).is_sure


def test_a_trial_takes_more_requests_while_it_is_close() -> None:
    trial = Trial(0.9, 100)
    assert trial.look([number % 10 != 0 for number in range(100)]) is None
    assert trial.look([number % 10 != 0 for number in range(799)]) is None
    verdict = trial.look([number % 10 != 0 for number in range(900)])
    assert verdict is not None and (verdict.num, verdict.holds, verdict.is_sure) == (800, True, False)


def test_a_trial_that_seems_to_hold_is_left_for_a_higher_rate() -> None:
    outcomes: list[bool | None] = [number % 20 != 0 for number in range(200)]
    assert Trial(0.94, 100).look(outcomes) is None
    verdict = Trial(0.94, 100, explores=True).look(outcomes)
    assert verdict is not None and verdict.num == 200 and verdict.holds and not verdict.is_sure


def test_a_clear_trial_ends_with_its_first_requests() -> None:
    verdict = Trial(0.9, 100).look([True] * 100 + [None])
    assert verdict is not None and verdict.holds and verdict.is_sure and verdict.num == 100
    assert Trial(0.9, 100).look([True] * 99 + [None] + [True] * 50) is None


def test_a_lost_trial_ends_before_its_requests_do() -> None:
    assert is_lost(30, 100, 0.9) and not is_lost(12, 100, 0.9)
    outcomes: list[bool | None] = [True] * 20 + [False] * 30 + [None] * 10
    verdict = Trial(0.9, 100).look(outcomes)
    assert verdict is not None and not verdict.holds


def test_what_is_open_when_time_is_over_has_missed() -> None:
    verdict = Trial(0.9, 50).end([True] * 8 + [None] * 2)
    assert (verdict.num, verdict.num_good) == (10, 8)


@pytest.mark.parametrize("capacity", [0.3, 1.0, 7.7, 900.0])
def test_the_search_ends_next_to_the_capacity(capacity: float) -> None:
    search, num_tried = RateSearch(1.0, 0.05), 0
    while (rate := search.next_rate) is not None:
        search.observe(rate, rate <= capacity)
        num_tried += 1
    assert search.held <= capacity < search.missed <= 1.05 * search.held + 1e-9
    assert num_tried <= 20


@pytest.mark.parametrize("holds", [True, False])
def test_a_search_without_an_end_is_given_up(holds: bool) -> None:
    search = RateSearch(2.0, 0.05)
    while (rate := search.next_rate) is not None:
        search.observe(rate, holds)
    assert math.isinf(search.missed) if holds else (search.held == 0.0 and search.missed < 0.05)


@pytest.mark.slow
def test_the_rate_of_a_queue_is_found() -> None:
    """Against the rate at which 95 % meet the goal in a run of 200,000 requests."""

    def share(rate: float) -> float:
        outcomes = queue_outcomes(rate, 200_000, 0)
        return sum(outcomes) / len(outcomes)

    search = RateSearch(0.5, 0.05)
    while (rate := search.next_rate) is not None:
        trial, outcomes = Trial(0.95, 400), queue_outcomes(rate, 5000, 1)
        verdict = trial.look(outcomes[40:])  # type: ignore[arg-type]
        assert verdict is not None
        search.observe(rate, verdict.holds)
    assert share(0.93 * search.held) >= 0.95 > share(1.12 * search.held)


@pytest.mark.parametrize(("first", "tolerance"), [(0.0, 0.05), (math.inf, 0.05), (1.0, 0.0), (1.0, 1.0)])
def test_a_search_that_could_not_end_is_refused(first: float, tolerance: float) -> None:
    with pytest.raises(ValueError, match="must"):
        RateSearch(first, tolerance)
