import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.load.summary import Distribution, RequestRecord, percentile, summarise


def record(start: float, *token_times: float, outcome: str = "ok", message: str = "") -> RequestRecord:
    return RequestRecord(
        0,
        start=start,
        token_times=list(token_times),
        output_tokens=len(token_times),
        prompt_tokens=10,
        outcome=outcome,
        message=message,
    )


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.floats(0, 100))
def test_percentile_is_numpys(values: list[float], q: float) -> None:
    assert percentile(sorted(values), q) == pytest.approx(float(np.percentile(values, q)), abs=1e-6)


def test_distribution_is_numpys() -> None:
    values = np.random.default_rng(0).exponential(0.1, 1000)
    found = Distribution.of_seconds(values.tolist())
    assert found.count == 1000
    assert found.mean == pytest.approx(values.mean() * 1000)
    assert (found.p50, found.p90, found.p95, found.p99) == pytest.approx(
        tuple(np.percentile(values * 1000, [50, 90, 95, 99]))
    )
    assert found.max == pytest.approx(values.max() * 1000)


def test_an_empty_distribution_is_zero() -> None:
    assert Distribution.of_seconds([math.nan]) == Distribution()


def test_latencies_of_one_request() -> None:
    one = record(10.0, 10.5, 10.6, 10.9)
    assert one.ttft_s == pytest.approx(0.5)
    assert one.tpot_s == pytest.approx(0.2)
    assert one.itls_s == pytest.approx([0.1, 0.3])
    assert one.e2e_s == pytest.approx(0.9)


def test_tpot_counts_tokens_not_events() -> None:
    held = record(0.0, 1.0, 2.0)  # an event may carry several tokens
    held.output_tokens = 11
    assert held.tpot_s == pytest.approx(0.1)


def test_one_token_has_no_tpot() -> None:
    assert math.isnan(record(0.0, 0.5).tpot_s)
    assert record(0.0, 0.5).meets(1000, 1)


@pytest.mark.parametrize(
    ("ttft_ms", "tpot_ms", "met"),
    [(0, 0, True), (500, 200, True), (499, 200, False), (500, 199, False), (0, 199, False), (499, 0, False)],
)
def test_both_slos_must_hold(ttft_ms: float, tpot_ms: float, met: bool) -> None:
    assert record(0.0, 0.5, 0.7).meets(ttft_ms, tpot_ms + 1e-6 if tpot_ms else 0) is met


def test_rates_and_goodput() -> None:
    runs = [
        record(0.0, 0.5, 1.0),
        record(0.5, 2.0, 4.0),
        record(1.0, outcome="http 503", message="no worker"),
        record(1.0, 1.1, outcome="interrupted"),
    ]
    found = summarise(runs, slo_ttft_ms=1000)
    assert found.duration_s == pytest.approx(4.0)
    assert (found.request_rate, found.input_tokens_per_s, found.output_tokens_per_s) == pytest.approx((0.5, 5.0, 1.0))
    assert found.goodput == pytest.approx(0.25)
    assert found.outcomes == {"ok": 2, "http 503": 1, "interrupted": 1}
    assert found.messages == {"http 503": "no worker"}


def test_nothing_succeeded() -> None:
    found = summarise([record(0.0, outcome="timeout")])
    assert (found.num_ok, found.duration_s, found.goodput) == (0, 0.0, 0.0)
