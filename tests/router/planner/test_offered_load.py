from __future__ import annotations

import random

import pytest

from router.planner.offered_load import LoadWindow, SampledRequest


def offer(window: LoadWindow, seconds: int, rate: float, start: float = 0.0, seed: int = 1) -> float:
    """Independent arrivals from `start` on; returns their end."""
    chance, now = random.Random(seed), start
    while (now := now + chance.expovariate(rate)) < start + seconds:
        window.arrived(now)
    return start + seconds


def test_a_steady_load_is_neither_a_burst_nor_a_trend() -> None:
    window = LoadWindow()
    load = window.offered(offer(window, 200, 20.0), ahead_s=60.0)
    assert load.rate == pytest.approx(20.0, rel=0.12)
    assert load.rate_ahead == load.rate and load.burstiness == 1.0


def test_a_burst_shows_at_once_and_does_not_count_as_burstiness() -> None:
    window = LoadWindow()
    end = offer(window, 15, 40.0, start=offer(window, 200, 10.0), seed=2)
    load = window.offered(end, ahead_s=0.0)
    assert load.rate < 20.0 and load.rate_ahead == pytest.approx(40.0, rel=0.2)
    assert load.burstiness < 2.0


def test_five_seconds_of_a_fourfold_load_are_no_chance() -> None:
    window = LoadWindow()
    end = offer(window, 5, 40.0, start=offer(window, 200, 10.0), seed=2)
    assert window.offered(end, ahead_s=0.0).rate_ahead == pytest.approx(40.0, rel=0.25)


def test_two_batches_at_once_are_no_burst() -> None:
    window = LoadWindow()
    for at in (*range(0, 120, 15), 121):  # twenty at a time
        window.arrived(float(at), 20)
    load = window.offered(125.0, ahead_s=0.0)
    assert load.burstiness > 4.0 and load.rate_ahead == load.rate


def test_a_rising_load_is_followed_to_where_a_worker_is_ready() -> None:
    window = LoadWindow()
    now = 0.0
    for step in range(24):
        now = offer(window, 5, 5.0 + step, start=now, seed=step)
    load = window.offered(now, ahead_s=30.0)
    assert load.rate_ahead == pytest.approx(5.0 + 24 + 6, rel=0.15)
    assert window.offered(now, ahead_s=1e6).rate_ahead <= 4 * load.rate_ahead, "not to where nothing is known"


def test_batches_of_arrivals_are_bursty() -> None:
    window, chance = LoadWindow(), random.Random(3)
    for second in range(0, 130):
        if chance.random() < 0.2:
            window.arrived(float(second), 20)
    assert window.offered(130.0, 0.0).burstiness > 4.0


def test_idle_is_told_and_a_fresh_window_is_not_diluted() -> None:
    window = LoadWindow()
    assert window.offered(9.0, 30.0).rate == 0.0 and window.offered(9.0, 30.0).idle_s > 1e9
    end = offer(window, 15, 20.0, start=1000.0)
    assert window.offered(end, 0.0).rate == pytest.approx(20.0, rel=0.3)
    assert window.offered(end + 400, 0.0).rate == 0.0
    assert window.offered(end + 400, 0.0).idle_s == pytest.approx(400, abs=1)


def test_the_sample_keeps_the_mean_and_the_tail() -> None:
    window, chance = LoadWindow(), random.Random(1)
    lengths = [round(chance.lognormvariate(6, 1)) for _ in range(1000)]
    for at, length in enumerate(lengths):
        window.ended(SampledRequest(length, length // 4, 100), at / 10)
    sample = window.offered(100.0, 0.0).requests
    assert len(sample) == 40
    assert sum(one.num_prompt for one in sample) / 40 == pytest.approx(sum(lengths) / 1000, rel=0.01)
    assert max(one.num_uncached for one in sample) > sorted(lengths)[970] * 0.75


def test_old_requests_are_forgotten_and_refused_ones_count() -> None:
    window = LoadWindow()
    window.refused(500, 0.0)
    assert window.offered(1.0, 0.0).requests == (SampledRequest(500, 0, 256),)
    for at in range(200):
        window.ended(SampledRequest(100, 50, 10), float(at))
    window.refused(900, 1000.0)
    sample = window.offered(1000.0, 0.0).requests
    assert sum(one.num_prompt for one in sample) / 40 == pytest.approx((63 * 100 + 900) / 64, rel=0.1)
    assert max(one.num_cached for one in sample) >= 250, "as much of it was cached as of those that were served"


def test_refused_requests_would_be_answered_like_those_served_not_like_the_last_one() -> None:
    window = LoadWindow()
    for at in range(200):
        window.ended(SampledRequest(100, 0, 390 if at % 2 else 10), at / 10)
    window.ended(SampledRequest(100, 0, 10), 20.0)
    for _ in range(300):
        window.refused(100, 20.0)
    sample = window.offered(21.0, 0.0).requests
    assert sum(one.num_output for one in sample) / len(sample) == pytest.approx(200, rel=0.05)


def test_measured_tails() -> None:
    window = LoadWindow(0.9)
    for at in range(100):
        window.first_token(0.1 if at < 90 else 2.0, 10.0)
        window.token_time(0.02, 10.0)
    assert window.tails_s(12.0) == (pytest.approx(0.1, rel=0.05), pytest.approx(0.02, rel=0.05))
    assert window.tails_s(900.0) == (0.0, 0.0)
