from __future__ import annotations

import math

import pytest

from benchmarks.plan.candidate import Candidate, Flags
from benchmarks.plan.evidence import Evidence, Tails, Trial, student, wilson


def trial(num_good: int, num: int = 100, seed: int = 0, tokens: int = 1000) -> Trial:
    return Trial(seed, num, num_good, num - num_good, 0, 0, 0, tokens, 10.0, (0.1, 0.2, 0.3), (0.01,))


def evidence(*trials: Trial) -> Evidence:
    return Evidence(Candidate(1, 1, Flags(64, 512, 64, 128)), trials)


def test_intervals_are_those_of_the_tables() -> None:
    assert wilson(95, 100) == pytest.approx((0.8882, 0.9785), abs=1e-4)
    assert wilson(100, 100) == pytest.approx((0.9630, 1.0), abs=1e-4)
    assert student([0.9, 1.0]) == pytest.approx((0.95 - 12.706 * 0.05, 0.95 + 12.706 * 0.05))


def test_the_wider_interval_counts() -> None:
    alike, unlike = evidence(trial(95), trial(95, seed=1)), evidence(trial(80), trial(100), trial(95))
    assert alike.interval == pytest.approx(wilson(190, 200))
    low, high = unlike.interval
    assert high == 1.0 and low < wilson(275, 300)[0]


def test_rates_and_cost() -> None:
    found = evidence(trial(90), trial(100, seed=1))
    assert found.attainment == 0.95
    assert found.share("num_refused") == 0.05
    assert found.goodput == 9.5
    assert found.token_cost(3.6) == pytest.approx(10.0)  # 100 tokens/s for 0.001 a second
    assert math.isinf(evidence(trial(0, tokens=0)).token_cost(1.0))


def test_tails_are_in_milliseconds() -> None:
    assert Tails.of([0.1 * number for number in range(1, 11)]) == Tails(
        pytest.approx(550), pytest.approx(955), pytest.approx(991)
    )
    assert Tails.of([]) == Tails()
