"""Limits of keys: alone, by model, and over the processes of a router."""

from __future__ import annotations

import errno
import math
import os
import random
from pathlib import Path

import pytest

from common.errors import MAX_RETRY_AFTER_S, ConfigError, InvalidRequest
from router.access.access_control import ClientRequest, CompletionRate
from router.access.errors import RateLimited
from router.access.keys import ANONYMOUS, ApiKey, Limits, read_keys
from router.access.limits import LimitExceeded, ModelLimits, Quota, SharedQuota, TokenBucket, duration
from router.siblings import usage
from router.siblings.part import RouterPart
from router.siblings.usage import SharedUsage


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


class World:
    """Limits at a moment that the test sets."""

    def __init__(self, **limits: Limits) -> None:
        self.now, self.limited = 1000.0, list[tuple[str, str]]()
        self.limits = ModelLimits(lambda key, limit: self.limited.append((key, limit)), lambda: self.now)
        self.limits.change(limits)

    def enter(self, model: str, key: ApiKey = ANONYMOUS) -> ClientRequest:
        client_request = ClientRequest("id", "POST", "/", "client", key)
        self.limits.enter(client_request, model)
        return client_request


def test_a_model_without_limits_counts_nothing() -> None:
    assert World().enter("a").model_quotas == ()


def test_a_limit_is_of_its_model_alone_and_comes_back_with_time() -> None:
    world = World(a=Limits(requests_per_minute=2), b=Limits(requests_per_minute=2))
    world.enter("a"), world.enter("a")
    with pytest.raises(RateLimited, match="model 'a': limit 2 requests per minute for all keys together. .* in 30 s"):
        world.enter("a")
    world.enter("b")
    world.now += 30
    world.enter("a")
    assert world.limited == [("", "model_requests")]


def test_both_limits_count_and_a_refusal_by_one_leaves_the_other_as_it_was() -> None:
    world = World(a=Limits(concurrent_requests=5))
    key = ApiKey("alice", (), by_model=(("a", Limits(concurrent_requests=1)),))
    first = world.enter("a", key)
    with pytest.raises(RateLimited, match="key 'alice' at model 'a': limit 1 concurrent requests") as refused:
        world.enter("a", key)
    assert refused.value.of_key and world.limited == [("alice", "key_model_concurrency")]
    assert world.limits._of_all["a"].quota.num_active == 1
    world.limits.leave(first)
    world.limits.leave(first)  # once is enough
    assert world.limits._of_all["a"].quota.num_active == 0
    world.enter("a", key)


def test_a_prompt_that_one_limit_refuses_is_not_counted_by_the_other() -> None:
    world = World(a=Limits(tokens_per_minute=100))
    key = ApiKey("alice", (), by_model=(("a", Limits(tokens_per_minute=50)),))
    client_request = world.enter("a", key)
    world.limits.take_prompt(client_request, 30)
    with pytest.raises(RateLimited):
        world.limits.take_prompt(client_request, 30)
    with pytest.raises(InvalidRequest, match="The prompt has 60 tokens, but key 'alice' at model 'a' is limited to 50"):
        world.limits.take_prompt(client_request, 60)
    world.limits.spend(client_request, -30)
    world.limits.take_prompt(world.enter("a"), 100)


def test_changed_limits_keep_what_is_used() -> None:
    world = World(a=Limits(requests_per_minute=2))
    world.enter("a"), world.enter("a")
    world.limits.change({"a": Limits(requests_per_minute=3), "b": Limits(requests_per_minute=1)})
    world.enter("a"), world.enter("b")
    for model in "ab":
        with pytest.raises(RateLimited):
            world.enter(model)
    world.limits.change({"a": Limits()})
    world.enter("a")


def test_limits_of_a_changed_key_file() -> None:
    world = World()
    key = ApiKey("alice", (), by_model=(("a", Limits(requests_per_minute=1)),))
    world.limits.leave(world.enter("a", key))
    more = ApiKey("alice", (), by_model=(("a", Limits(requests_per_minute=2)),))
    world.limits.change_keys([more])
    world.limits.leave(world.enter("a", more))
    with pytest.raises(RateLimited):
        world.enter("a", more)
    world.limits.change_keys([])
    assert not world.limits._of_keys


HEAD = '[[key]]\nname = "alice"\nkey = "a-key-of-sixteen-or-more"\n'


def test_models_in_the_key_file(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(HEAD + 'models = ["a", "b", "a"]\n[key.by_model.a]\ntokens_per_minute = 7\n')
    (key,) = read_keys(str(file))
    assert key.models == ("a", "b")
    assert (key.limits_at("a"), key.limits_at("b")) == (Limits(tokens_per_minute=7), Limits())


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("models = []", "line 4 must have a list of 1 to 256 model names"),
        ("models = 'a'", "line 4 must have a list of 1 to 256 model names"),
        ("by_model = 3", "line 4 must have a table of up to 256 models"),
        (
            "by_model = { a = { rpm = 3 } }",
            "line 4 must have a table of up to 256 models, each with",
        ),
        ("by_model = { a = { tokens_per_minute = -3 } }", "line 4 must have a whole number from 0"),
    ],
)
def test_mistakes_in_the_key_file(tmp_path: Path, line: str, why: str) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(HEAD + line + "\n")
    with pytest.raises(ConfigError, match=why):
        read_keys(str(file))


class Processes:
    """Each maps the same folder, as it would in a process of its own."""

    def __init__(self, folder: Path, num: int, limits: Limits) -> None:
        self.folder, self.num, self.limits = folder, num, limits
        self.usages = [self.start(index) for index in range(num)]

    def start(self, index: int) -> SharedUsage:
        return SharedUsage(RouterPart(index, self.num, self.folder))

    def quota(self, index: int, now: float = 0.0, name: str = "one") -> SharedQuota:
        return SharedQuota(self.limits, now, self.usages[index].of_key(name))


@pytest.fixture
def processes_of(tmp_path: Path):
    return lambda num=3, **limits: Processes(tmp_path, num, Limits(**limits))


def test_requests_count_wherever_they_come(processes_of) -> None:
    processes = processes_of(requests_per_minute=3)
    first, second = processes.quota(0), processes.quota(1)
    assert [first.enter(0.0), second.enter(0.0), first.enter(0.0)] == [None, None, None]
    assert second.enter(0.0) == first.enter(0.0) == LimitExceeded("requests", 3, 20.0)
    assert first.headers(0.0)["x-ratelimit-remaining-requests"] == "0"
    third = processes.quota(2)  # the key comes here for the first time
    assert third.enter(0.0) == LimitExceeded("requests", 3, 20.0)
    assert third.enter(20.0) is None and first.enter(20.0) is not None


def test_another_key_is_another(processes_of) -> None:
    processes = processes_of(requests_per_minute=1)
    assert processes.quota(0).enter(0.0) is None
    assert processes.quota(1, name="two").enter(0.0) is None


def test_requests_at_once_over_processes(processes_of) -> None:
    processes = processes_of(concurrent_requests=2)
    first, second = processes.quota(0), processes.quota(1)
    assert [first.enter(0.0), second.enter(0.0)] == [None, None]
    assert first.enter(0.0) == second.enter(0.0) == LimitExceeded("concurrency", 2, 1.0)
    second.leave()
    assert first.enter(0.0) is None


def test_tokens_are_spent_for_all(processes_of) -> None:
    processes = processes_of(tokens_per_minute=60)
    first, second = processes.quota(0), processes.quota(1)
    assert first.take_prompt(40, 0.0) is None
    first.spend(15, 0.0)
    assert second.take_prompt(10, 0.0) == LimitExceeded("tokens", 60, 5.0)
    first.spend(-40, 0.0)  # the prompt was not computed
    assert second.take_prompt(10, 0.0) is None
    first.look(0.0)
    assert first.headers(0.0)["x-ratelimit-remaining-tokens"] == "35"


def test_what_was_used_long_ago_counts_no_more(processes_of) -> None:
    processes = processes_of(tokens_per_minute=60)
    first, second = processes.quota(0), processes.quota(1)
    for now in range(0, 3600, 10):
        assert first.take_prompt(10, float(now)) is None
        second.look(float(now))  # as access control polls twice a second
    assert second.check_tokens(3600.0) is None
    assert processes.quota(2, 3600.0).take_prompt(50, 3600.0) is None


def test_a_process_that_is_started_again_knows_what_was_used(processes_of) -> None:
    processes = processes_of(requests_per_minute=2, concurrent_requests=5)
    dying, other = processes.quota(0), processes.quota(1)
    assert [dying.enter(0.0), dying.enter(0.0)] == [None, None]
    processes.usages[0] = processes.start(0)
    again = processes.quota(0)
    assert again.enter(0.0) == LimitExceeded("requests", 2, 30.0)
    other.look(0.0)
    assert other.num_elsewhere == 0  # its requests have ended with it


def test_together_they_grant_no_more_than_one(processes_of) -> None:
    rng, now, taken = random.Random(5), 0.0, 0
    processes = processes_of(tokens_per_minute=600)
    quotas = [processes.quota(index) for index in range(3)]
    while now < 300:
        now += rng.random()
        amount = rng.randrange(1, 40)
        if rng.choice(quotas).take_prompt(amount, now) is None:
            taken += amount
        for quota in quotas:
            quota.look(now)
    assert 0.95 * (600 + 10 * now) < taken <= 600 + 10 * now


def test_more_keys_than_rows_have_limits_at_each_process(processes_of, monkeypatch: pytest.MonkeyPatch) -> None:
    processes = processes_of(requests_per_minute=1)
    monkeypatch.setattr(usage, "MAX_KEYS", 2)
    for name in ("a", "b", "c"):
        quota = processes.quota(0, name=name)
        assert quota.enter(0.0) is None and quota.enter(0.0) is not None
        assert (processes.quota(1, name=name).enter(0.0) is None) is (name == "c")


def test_without_room_on_the_disk_each_process_grants_by_itself(processes_of, monkeypatch) -> None:
    processes = processes_of(num=2, requests_per_minute=1)
    assert processes.quota(0).enter(0.0) is None

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(usage.os, "posix_fallocate", full)
    for _ in range(2):  # the second one of a process that was started again meanwhile
        own, other = processes.quota(0, name="late"), processes.quota(1, name="late")
        assert [own.enter(0.0), other.enter(0.0)] == [None, None]
        assert own.enter(0.0) is not None and other.enter(0.0) is not None
        processes.usages[1] = processes.start(1)
