"""Worker-seconds and prediction errors, from what a router says."""

import asyncio
import random

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from benchmarks.load.prediction import buckets_of, error_between, errors_between
from benchmarks.load.watch import ServerWatch, WorkersAt, cost_of, workers_in

from ..conftest import ScriptedServer

NAME = "diptych_ttft_prediction_ratio"
BOUNDS = (0.25, 0.5, 0.67, 0.75, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 1.33, 1.5, 2.0, 4.0, 8.0)


def test_workers_are_counted_by_role_while_they_run() -> None:
    states = [("prefill", "ready"), ("decode", "ready"), ("decode", "draining"), ("decode", "dead"), ("x", "unknown")]
    workers = [{"role": role, "state": state} for role, state in states]
    assert workers_in({"workers": workers}) == {"prefill": 1, "decode": 2}


@pytest.mark.parametrize("answer", [None, {}, {"workers": 3}, {"workers": [{"role": "decode"}]}, {"workers": [1]}])
def test_other_answers_are_refused(answer: object) -> None:
    with pytest.raises(ValueError, match="/load"):
        workers_in(answer)


def test_worker_seconds_and_their_price() -> None:
    samples = [WorkersAt(0, {"prefill": 1, "decode": 1}), WorkersAt(10, {"prefill": 1, "decode": 3})]
    found = cost_of(samples, 16.0, {"prefill": 3600.0, "decode": 1800.0})
    assert found.worker_s == {"prefill": 16.0, "decode": 28.0}
    assert found.cost == pytest.approx(16 + 14)
    assert found.per_million(1000) == pytest.approx(30_000)
    assert cost_of(samples, 16.0, {}).cost == 0.0 and found.per_million(0) == 0.0


async def test_another_server_is_not_watched(server: ScriptedServer) -> None:
    watch = ServerWatch(server.url)
    async with watch.during():
        pass
    assert watch.cost({}) is None and watch.errors == {}


async def test_a_router_is_watched(server: ScriptedServer) -> None:
    watch = ServerWatch(f"{server.url}/diptych")
    async with watch.during():
        while not watch.samples:  # noqa: ASYNC110 (the watch fills it)
            await asyncio.sleep(0.01)
    cost = watch.cost({"prefill": 3600.0})
    assert cost is not None
    assert cost.worker_s == {"prefill": watch.seconds, "decode": 2 * watch.seconds}
    assert cost.cost == pytest.approx(watch.seconds)
    assert watch.errors["TTFT"].num == 10 and 0.0 < watch.errors["TTFT"].p50 < watch.errors["TTFT"].p90 < 0.05


def test_errors_are_those_of_the_requests_within_a_bucket() -> None:
    registry = CollectorRegistry()
    histogram = Histogram(NAME, "ratio", ["engine"], buckets=BOUNDS, registry=registry)
    for _ in range(500):  # before the run: must not count
        histogram.labels("router").observe(5.0)
    before = generate_latest(registry).decode()
    source, ratios = random.Random(3), []
    for _ in range(2000):
        ratios.append(source.lognormvariate(0.1, 0.2))
        histogram.labels("router").observe(ratios[-1])
    found = errors_between(before, generate_latest(registry).decode())
    assert set(found) == {"TTFT"}
    errors = sorted(abs(1 / ratio - 1) for ratio in ratios)
    assert found["TTFT"].num == 2000
    assert found["TTFT"].p50 == pytest.approx(errors[1000], abs=0.02)
    assert found["TTFT"].p90 == pytest.approx(errors[1800], abs=0.04)
    assert found["TTFT"].ratio_p50 == pytest.approx(sorted(ratios)[1000], abs=0.03)


def test_without_observations_there_is_no_error() -> None:
    assert buckets_of("# nothing\n", NAME) == {}
    assert error_between({}, {}) is None
    assert error_between({1.0: 5.0, float("inf"): 5.0}, {1.0: 5.0, float("inf"): 5.0}) is None
