"""Formulas against what is known of them, and against a simulated queue."""

from __future__ import annotations

import heapq
import math
import random

import pytest

from router.planner.queueing import NO_LIMIT, QueueWait, erlang_c, late, peak, response_quantile, wait


def test_one_exponential_server_waits_as_the_textbook_says() -> None:
    assert erlang_c(1, 0.7) == pytest.approx(0.7)
    assert erlang_c(2, 1.0) == pytest.approx(1 / 3)
    assert erlang_c(50, 45.0) < erlang_c(2, 1.8)


def test_more_than_can_be_served_waits_without_limit() -> None:
    assert wait(2, 4.0, [0.5], 1.0) == NO_LIMIT
    assert math.isinf(response_quantile(NO_LIMIT, [0.1], 0.95))
    assert wait(2, 0.0, [0.5], 1.0) == wait(2, 1.0, [], 1.0) == QueueWait(0.0, 0.0)


def test_the_quantile_is_where_the_share_is_late() -> None:
    queue, own = wait(3, 8.0, [0.1, 0.2, 0.6], 1.0), [0.1, 0.2, 0.6]
    found = response_quantile(queue, own, 0.95)
    assert late(queue, own, found) == pytest.approx(0.05, abs=1e-3)
    assert response_quantile(QueueWait(0.0, 0.0), own, 0.95) == pytest.approx(0.6, abs=1e-3), "own times alone"


@pytest.mark.parametrize(("num_servers", "load"), [(1, 0.6), (4, 0.85)])
def test_the_tail_is_that_of_a_simulated_queue(num_servers: int, load: float) -> None:
    chance = random.Random(5)
    times = [0.1, 0.2, 0.3, 0.8]
    rate = load * num_servers / (sum(times) / 4)
    now, free, took = 0.0, [0.0] * num_servers, []
    for _ in range(30_000):
        now += chance.expovariate(rate)
        began, own = max(now, heapq.heappop(free)), chance.choice(times)
        heapq.heappush(free, began + own)
        took.append(began + own - now)
    measured = sorted(took)[int(0.95 * len(took))]
    predicted = response_quantile(wait(num_servers, rate, times, 1.0), times, 0.95)
    assert predicted == pytest.approx(measured, rel=0.2)


def test_a_peak_lies_above_the_mean_by_deviations() -> None:
    assert peak(100.0, 1.0, 0.5) == 100.0
    assert peak(100.0, 1.0, 0.95) == pytest.approx(116.4, abs=0.1)
    assert peak(100.0, 4.0, 0.95) == pytest.approx(132.9, abs=0.1)
