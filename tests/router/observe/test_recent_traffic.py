"""What the router served lately: rates of the last seconds, percentiles of the last minutes."""

from __future__ import annotations

from typing import Any

import pytest

from common.errors import Overloaded
from common.observe.averages import RecentQuantile
from router.dispatch.client import RequestTimeline
from router.dispatch.load import DispatchLoad
from router.observe.metrics import RouterMetrics
from router.observe.recent_traffic import RATE_S, WINDOW_S, RecentTraffic
from router.observe.request_record import ChoiceRecord, RequestRecord


def answered(line: RequestTimeline | None = None, **fields: Any) -> RequestRecord:
    """Five tokens, of which the later four took a second."""
    choice = ChoiceRecord(0, 5, "stop", 1.5, 2.5, line)
    facts: dict[str, Any] = {"num_prompt_tokens": 30, "num_cached_tokens": 10, "choices": (choice,), "status": 200}
    return RequestRecord("r", "/v1/completions", began=1.0, ended=3.0, **(facts | fields))


def about(seconds: float) -> Any:
    return pytest.approx(seconds * 1e3, rel=0.05)


def test_without_traffic_everything_is_0() -> None:
    summary = RecentTraffic().summary(50.0)
    assert summary.rates.requests_per_s == summary.rates.output_tokens_per_s == 0.0
    assert (summary.ttft.num, summary.ttft.p99_ms) == (0, 0.0)


def test_rates_are_of_whole_seconds_since_the_first() -> None:
    traffic = RecentTraffic()
    traffic.first_tokens(0.2, 1, 100.2)
    assert traffic.summary(100.9).rates.output_tokens_per_s == 0.0, "the second is not over"
    for at in (101.1, 102.1, 103.1):
        traffic.tokens(0.01, 4, at)
        traffic.ended(answered(), at)
    rates = traffic.summary(104.5).rates
    assert (rates.output_tokens_per_s, rates.requests_per_s) == (13 / 4, 3 / 4)
    assert (rates.prompt_tokens_per_s, rates.cached_tokens_per_s) == (90 / 4, 30 / 4)
    assert traffic.summary(101.0 + RATE_S).rates.requests_per_s == 3 / RATE_S
    assert traffic.summary(103.0 + RATE_S).rates.requests_per_s == 1 / RATE_S
    assert traffic.summary(104.0 + RATE_S).rates.requests_per_s == 0.0


def test_percentiles_are_of_the_last_minutes() -> None:
    traffic = RecentTraffic()
    for number in range(1, 101):
        traffic.first_tokens(number / 100, 1, 10.0)
    ttft = traffic.summary(20.0).ttft
    assert (ttft.num, ttft.p50_ms, ttft.p90_ms, ttft.p99_ms) == (100, about(0.5), about(0.9), about(0.99))
    assert traffic.summary(20.0 + WINDOW_S).ttft.num == 0


def test_a_step_with_several_tokens_is_several_gaps() -> None:
    traffic = RecentTraffic()
    traffic.tokens(0.04, 4, 10.0)
    traffic.tokens(0.5, 1, 10.0)
    itl = traffic.summary(11.0).itl
    assert (itl.num, itl.p50_ms, itl.p99_ms) == (5, about(0.01), about(0.5))


def test_an_answer_has_a_wait_a_pace_and_a_transfer() -> None:
    traffic = RecentTraffic()
    line = RequestTimeline(queue_s=0.1, transfer_s=0.2, exposed_transfer_s=0.05, transfer_bytes=4000)
    traffic.ended(answered(line), 10.0)
    traffic.ended(answered(RequestTimeline(queue_s=0.1)), 10.0)
    summary = traffic.summary(11.0)
    assert (summary.tpot.num, summary.tpot.p50_ms, summary.queue.p50_ms) == (2, about(0.25), about(0.1))
    assert (summary.transfer.num, summary.transfer.p90_ms) == (1, about(0.2)), "one prompt was computed in place"
    assert summary.exposed_transfer.p50_ms == about(0.05)
    assert (summary.rates.transfers_per_s, summary.rates.transfer_bytes_per_s) == (1.0, 4000.0)


def test_who_was_told_an_error_and_who_left() -> None:
    traffic = RecentTraffic()
    traffic.ended(answered(status=429, error=Overloaded("full"), choices=()), 10.0)
    traffic.ended(answered(status=499, client_left=True), 10.0)
    rates = traffic.summary(11.0).rates
    assert (rates.failed_per_s, rates.requests_per_s) == (1.0, 0.0)


def test_the_metrics_feed_it() -> None:
    now = [10.0]
    metrics = RouterMetrics("tiny", lambda: DispatchLoad({}, (), {}, {}, {}, 0), lambda: now[0])
    metrics.observe_first(0.3, 1)
    metrics.observe_gap(0.02, 2)
    metrics.observe_request(answered())
    summary = metrics.traffic.summary(11.0)
    assert (summary.ttft.num, summary.itl.num, summary.tpot.num) == (1, 2, 1)
    assert (summary.rates.output_tokens_per_s, summary.rates.requests_per_s) == (3.0, 1.0)


def test_quantiles_of_one_look_are_those_of_many() -> None:
    recent = RecentQuantile()
    for number in range(1, 51):
        recent.observe(number / 50, 1.0, num=number % 3 + 1)
    num, found = recent.quantiles((0.0, 0.1, 0.5, 0.99, 1.0), 2.0)
    assert num == sum(number % 3 + 1 for number in range(1, 51))
    assert found[1:] == [recent.quantile(share, 2.0) for share in (0.1, 0.5, 0.99, 1.0)]
    assert found[0] == pytest.approx(1 / 50, rel=0.05)
