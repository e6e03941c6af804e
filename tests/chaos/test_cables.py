"""Processes in network namespaces: cables that are cut, for a moment or for good, and cables that are slow."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest

from benchmarks.stack import Stack

from .network import Network, why_not
from .streams import Ask, Client, Heard, answers, difference, plan
from .watch import is_ready, settle

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]

LIMIT_S = 2.0
MOMENT_S, LONG_S = 0.7, 3 * LIMIT_S
BACK_S = 60.0
NAMES = ("router", "prefill-0", "decode-0", "decode-1")
FLAGS = ("--kv-transport", "tcp", "--router-timeout-s", str(2 * LIMIT_S))


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    if reason := why_not():
        pytest.skip(f"no network namespaces here: {reason}")
    with Network(NAMES) as built:
        yield built


@pytest.fixture(scope="module")
def shared_stack(network: Network, stacks: Any) -> Iterator[Stack]:
    stack = stacks(
        1,
        2,
        places=network.places,
        worker_flags=FLAGS,
        prefill_flags=("--kv-lease-s", str(LIMIT_S)),
        decode_flags=("--transfer-timeout-s", str(LIMIT_S)),
        router_flags=("--worker-timeout-s", str(LIMIT_S), "--local-prefill-threshold", "0"),
    )
    yield stack
    stack.stop()  # before its network


@pytest.fixture
async def stack(shared_stack: Stack) -> AsyncIterator[Stack]:
    """Afterwards every worker is back and no request holds anything."""
    yield shared_stack
    deadline = time.monotonic() + BACK_S
    for worker in shared_stack.workers():
        while not await is_ready(worker):
            worker.check(deadline, "is not ready after its cable was put back")
            await asyncio.sleep(0.1)
    await asyncio.to_thread(shared_stack.wait_ready, deadline)
    await settle(shared_stack, BACK_S)


def asks() -> list[Ask]:
    return [Ask({**ask.body, "max_tokens": 150, "ignore_eos": True, "stop": None}) for ask in plan(21, 12)]


async def undisturbed(stack: Stack) -> list[Heard]:
    async with Client(stack.url) as client:
        return await answers(client, asks(), salt="undisturbed")


async def asked_during(stack: Stack, trouble: AbstractContextManager[None], seconds: float, salt: str) -> list[Heard]:
    """Answers to two rounds of asks: one whose streams run when the trouble begins, one that begins amid it."""
    async with Client(stack.url) as client, asyncio.TaskGroup() as tasks:
        early = [tasks.create_task(client.ask(ask, salt=f"{salt} 1")) for ask in asks()]
        await asyncio.sleep(0.3)  # streams are under way; the outcome does not depend on how far
        with trouble:
            late = [tasks.create_task(client.ask(ask, salt=f"{salt} 2")) for ask in asks()]
            await asyncio.sleep(seconds)
        return [await task for task in (*early, *late)]


def check(heard: list[Heard], expected: list[Heard]) -> None:
    problems = [difference(one, should) for one, should in zip(heard, (*expected, *expected), strict=True)]
    assert not any(problems), [problem for problem in problems if problem]


@pytest.mark.parametrize("seconds", [MOMENT_S, LONG_S], ids=["for a moment", "for long"])
@pytest.mark.parametrize("name", ["decode-0", "prefill-0"])
async def test_a_cut_cable(stack: Stack, network: Network, name: str, seconds: float) -> None:
    """Router and the other pool are both out of reach."""
    expected = await undisturbed(stack)
    heard = await asked_during(stack, network.cut(name), seconds, f"cut {name} {seconds}")
    check(heard, expected)


@pytest.mark.parametrize("seconds", [MOMENT_S, LONG_S], ids=["for a moment", "for long"])
@pytest.mark.parametrize("ends", [("router", "decode-0"), ("router", "prefill-0"), ("prefill-0", "decode-0")])
async def test_two_that_cannot_reach_each_other(
    stack: Stack, network: Network, ends: tuple[str, str], seconds: float
) -> None:
    expected = await undisturbed(stack)
    heard = await asked_during(stack, network.cut_between(*ends), seconds, f"between {ends} {seconds}")
    check(heard, expected)


@pytest.mark.parametrize("name", ["decode-0", "prefill-0"])
async def test_a_slow_cable(stack: Stack, network: Network, name: str) -> None:
    expected = await undisturbed(stack)
    heard = await asked_during(stack, network.slow(name, rate="10mbit", queue_ms=30), LONG_S, f"slow {name}")
    check(heard, expected)
