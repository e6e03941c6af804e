"""Jobs of many answers share the time of a turn of the event loop, in their order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from router.generation.budgets import LoopTimeBudget


class Work:
    """Jobs that take seconds by a clock that only they move."""

    def __init__(self, turn_s: float) -> None:
        self.now, self.done = 0.0, ""
        self.budget = LoopTimeBudget(turn_s, clock=lambda: self.now)

    def job(self, name: str, took_s: float = 1.0) -> Callable[[], str]:
        def run() -> str:
            self.now += took_s
            self.done += name
            return name

        return run

    def begin(self, names: str, took_s: float = 1.0) -> list[asyncio.Task[str]]:
        return [asyncio.create_task(self.budget.run(self.job(name, took_s))) for name in names]


async def turns(work: Work) -> list[str]:
    """The jobs that were done in each turn, until a turn has none."""
    found: list[str] = []
    before = len(work.done)
    while True:
        await asyncio.sleep(0)
        if len(work.done) == before:
            return found
        found.append(work.done[before:])
        before = len(work.done)


async def test_jobs_run_in_order_until_the_time_of_a_turn_is_over() -> None:
    work = Work(2.5)
    tasks = work.begin("abcdefgh")
    assert await turns(work) == ["abc", "def", "gh"]
    assert [await task for task in tasks] == [*"abcdefgh"]


async def test_a_job_that_comes_later_waits_behind_those_that_wait() -> None:
    work = Work(1.0)
    tasks = work.begin("abc")
    await asyncio.sleep(0)
    assert work.done == "a" and not work.budget.has_time
    tasks += work.begin("d")
    await asyncio.gather(*tasks)
    assert work.done == "abcd"


async def test_a_job_that_could_not_wait_counts() -> None:
    work = Work(1.0)
    assert work.budget.has_time and work.budget.run_now(work.job("a")) == "a"
    assert not work.budget.has_time
    await asyncio.gather(*work.begin("b"))
    assert work.done == "ab"


async def test_the_next_turn_has_all_its_time() -> None:
    work = Work(1.0)
    work.budget.run_now(work.job("a", took_s=100.0))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert work.budget.has_time


async def test_a_cancelled_job_is_not_run() -> None:
    work = Work(1.0)
    tasks = work.begin("abc")
    await asyncio.sleep(0)
    tasks[1].cancel()
    assert await asyncio.gather(*tasks, return_exceptions=True) != [*"abc"]
    assert work.done == "ac"


async def test_an_error_ends_its_own_job_only() -> None:
    work = Work(1.0)

    def fail() -> str:
        work.now += 1.0
        raise ValueError("broken")

    first, broken, last = work.begin("a")[0], asyncio.create_task(work.budget.run(fail)), work.begin("b")[0]
    with pytest.raises(ValueError, match="broken"):
        await broken
    assert (await first, await last) == ("a", "b")
