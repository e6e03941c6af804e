from __future__ import annotations

import math
import random

import pytest

from common.errors import MAX_RETRY_AFTER_S
from router.access.access_control import CompletionRate
from router.access.keys import Limits
from router.access.limits import LimitExceeded, Quota, TokenBucket, duration


def test_a_bucket_holds_a_minute_and_fills_evenly() -> None:
    bucket = TokenBucket(60, now=100.0)
    bucket.take(60, 100.0)
    assert (bucket.level(100.0), bucket.wait_s(1, 100.0)) == (0.0, 1.0)
    assert (bucket.level(110.0), bucket.wait_s(30, 110.0)) == (10.0, 20.0)
    assert bucket.level(1000.0) == 60.0


def test_more_than_a_minute_holds_can_never_be_taken() -> None:
    assert TokenBucket(60, 0.0).wait_s(61, 0.0) == math.inf


def test_a_debt_is_paid_before_anything_is_given() -> None:
    bucket = TokenBucket(60, 0.0)
    bucket.take(90, 0.0)
    assert (bucket.level(0.0), bucket.wait_s(1, 0.0), bucket.level(30.0)) == (-30.0, 31.0, 0.0)


def test_a_clock_that_stands_still_or_goes_back_gives_nothing() -> None:
    bucket = TokenBucket(60, 10.0)
    bucket.take(60, 10.0)
    assert bucket.level(5.0) == bucket.level(10.0) == 0.0


def test_no_key_gets_more_than_a_minute_and_its_refill() -> None:
    rng, now, taken = random.Random(5), 0.0, 0
    bucket = TokenBucket(600, now)
    while now < 300:
        now += rng.random()
        amount = rng.randrange(1, 40)
        if bucket.wait_s(amount, now) == 0:
            bucket.take(amount, now)
            taken += amount
    assert 0.95 * (600 + 10 * now) < taken <= 600 + 10 * now


def test_requests_at_once() -> None:
    quota = Quota(Limits(concurrent_requests=2), 0.0)
    assert [quota.enter(0.0), quota.enter(0.0)] == [None, None]
    assert quota.enter(0.0) == LimitExceeded("concurrency", 2, 1.0)
    quota.leave()
    assert quota.enter(0.0) is None


def test_requests_per_minute() -> None:
    quota = Quota(Limits(requests_per_minute=2), 0.0)
    assert [quota.enter(0.0), quota.enter(0.0)] == [None, None]
    assert quota.enter(0.0) == LimitExceeded("requests", 2, 30.0)
    assert quota.num_active == 2  # the refused one is not among them
    assert quota.enter(30.0) is None


def test_what_concurrency_refuses_costs_no_request() -> None:
    quota = Quota(Limits(requests_per_minute=2, concurrent_requests=1), 0.0)
    assert quota.enter(0.0) is None
    assert [denied.limit for denied in (quota.enter(0.0), quota.enter(0.0)) if denied] == ["concurrency"] * 2
    quota.leave()
    assert quota.enter(0.0) is None


def test_tokens_are_counted_as_they_come() -> None:
    quota = Quota(Limits(tokens_per_minute=600), 0.0)
    assert quota.check_tokens(0.0) is None and quota.take_prompt(400, 0.0) is None
    assert quota.take_prompt(300, 0.0) == LimitExceeded("tokens", 600, 10.0)
    quota.spend(250, 0.0)  # the stream goes on
    assert quota.check_tokens(0.0) == LimitExceeded("tokens", 600, pytest.approx(5.1))
    assert quota.take_prompt(601, 0.0) == LimitExceeded("tokens", 600, math.inf)
    quota.spend(-400, 0.0)
    assert quota.take_prompt(350, 0.0) is None


def test_without_limits_there_are_no_refusals_and_no_headers() -> None:
    quota = Quota(Limits(), 0.0)
    quota.spend(10**9, 0.0)
    assert quota.enter(0.0) is None and quota.take_prompt(10**9, 0.0) is None and quota.headers(0.0) == {}


def test_changed_limits_forget_no_use() -> None:
    quota = Quota(Limits(requests_per_minute=10, tokens_per_minute=100), 0.0)
    assert all(quota.enter(0.0) is None for _ in range(6))
    quota.change(Limits(requests_per_minute=20), 0.0)
    assert quota.headers(0.0)["x-ratelimit-remaining-requests"] == "14"
    assert quota.take_prompt(10**6, 0.0) is None
    quota.change(Limits(requests_per_minute=5), 0.0)
    denied = quota.enter(0.0)
    assert denied is not None and denied.retry_after_s == pytest.approx(24.0)


def test_the_headers_are_those_of_openai() -> None:
    quota = Quota(Limits(requests_per_minute=60, tokens_per_minute=6000), 0.0)
    quota.enter(0.0)
    quota.take_prompt(650, 0.0)
    assert quota.headers(0.0) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "6000",
        "x-ratelimit-remaining-tokens": "5350",
        "x-ratelimit-reset-tokens": "6.5s",
    }


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0ms"), (0.0121, "13ms"), (1, "1s"), (1.5, "1.5s"), (59.9, "59.9s"), (60, "1m0s"), (360.2, "6m1s")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_the_time_to_drain_follows_the_pace() -> None:
    completion_rate = CompletionRate()
    assert completion_rate.drain_s(10, 0.0) is None
    for i in range(20):
        completion_rate.ended(i * 0.5)
    assert completion_rate.drain_s(10, 10.0) == pytest.approx(5.0)
    assert completion_rate.drain_s(10**6, 10.0) == MAX_RETRY_AFTER_S
    assert completion_rate.drain_s(10, 100.0) is None  # too long ago to tell
