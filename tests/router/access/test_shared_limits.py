"""Limits of one key over the processes of a router."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import pytest

from router.access.keys import Limits
from router.access.limits import LimitExceeded, SharedQuota
from router.siblings import usage
from router.siblings.part import RouterPart
from router.siblings.usage import SharedUsage


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


def test_requests_at_once(processes_of) -> None:
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
