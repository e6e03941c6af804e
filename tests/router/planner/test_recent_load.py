"""A window that forgets what came before the load changed."""

from __future__ import annotations

import math
import random

import pytest

from router.planner.recent_load import FEWEST_NEW, RecentLoad


def offer(load: RecentLoad, begin: float, seconds: float, rate: float, prompt: int, output: int, seed: int = 1) -> None:
    """Poisson arrivals, and a look twice a second."""
    chance, at, look = random.Random(seed), begin, begin
    while True:
        at += chance.expovariate(rate)
        while look < min(at, begin + seconds):
            load.offered(look)
            look += 0.5
        if at >= begin + seconds:
            return
        load.arrived(prompt, 0, output, at)


def test_a_steady_load_is_averaged() -> None:
    load = RecentLoad()
    offer(load, 0.0, 60.0, 4.0, 1000, 50)
    found = load.offered(60.0)
    assert found is not None and found.rate == pytest.approx(4.0, rel=0.25)
    assert (found.requests[0].num_uncached, found.requests[0].num_output) == (1000, 50)
    assert load.num_seen > 80 and load.lasting_s(60.0) == math.inf


def test_another_mix_is_seen_within_seconds() -> None:
    load = RecentLoad()
    offer(load, 0.0, 40.0, 2.8, 4000, 32)
    offer(load, 40.0, 4.0, 3.6, 100, 200, seed=2)
    found = load.offered(44.0)
    assert found is not None
    short = [one for one in found.requests if one.num_uncached == 100]
    assert len(short) >= 0.8 * len(found.requests)


def test_a_load_that_ends_is_forgotten() -> None:
    load = RecentLoad()
    offer(load, 0.0, 20.0, 4.0, 1000, 50)
    for half in range(40, 70):
        found = load.offered(half / 2)
    assert found is None


def test_too_few_requests_tell_nothing() -> None:
    load = RecentLoad()
    for number in range(FEWEST_NEW - 1):
        load.arrived(100, 0, 10, 0.1 * number)
    assert load.offered(5.0) is None
    load.arrived(100, 0, 10, 5.0)
    assert load.offered(5.1) is not None


def test_one_very_long_prompt_is_no_change() -> None:
    load = RecentLoad()
    offer(load, 0.0, 20.0, 4.0, 500, 50)
    load.arrived(100_000, 0, 50, 20.0)
    offer(load, 20.0, 2.0, 4.0, 500, 50, seed=3)
    assert load.offered(22.0) is not None and load.num_seen > 60


def test_answers_are_as_long_as_those_to_like_prompts() -> None:
    load = RecentLoad()
    for _ in range(50):
        load.ended(4000, 30)
        load.ended(100, 400)
    for number in range(8):
        load.arrived((4000, 100)[number % 2], 0, 1000, 0.2 * number)
    found = load.offered(2.0)
    assert found is not None
    assert [one.num_output < 50 for one in found.requests] == [one.num_prompt == 4000 for one in found.requests]


def test_what_was_turned_away_unread_counts_like_the_one_before() -> None:
    load = RecentLoad()
    load.arrived(700, 0, 20, 0.0)
    for number in range(9):
        load.turned_away(0.2 * number)
    found = load.offered(2.0)
    assert (
        found is not None and found.rate == pytest.approx(5.0) and {one.num_prompt for one in found.requests} == {700}
    )


def test_loads_last_as_long_as_they_did() -> None:
    load = RecentLoad()
    for number in range(6):
        kind = ((2.8, 4000, 32), (3.6, 100, 200))[number % 2]
        offer(load, 20.0 * number, 20.0, *kind, seed=number)
    assert 5.0 < load.lasting_s(103.0) < 20.0
