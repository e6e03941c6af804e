"""A router that is frozen until all workers took it for dead: its streams go on when it wakes up, others never stop."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from benchmarks.stack import Stack

from .streams import Ask, Client, Heard, answers, difference, plan
from .watch import counter, settle, until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ROUTER_TIMEOUT_S, WORKER_TIMEOUT_S = 1.0, 2.0
NUM_FROZEN, NUM_OTHER = 6, 4
NUM_TOKENS = 1800
"""More than a worker generates until it has noticed the silence."""


def asks_of(seed: int, count: int, *, max_tokens: int) -> list[Ask]:
    """Greedy and seeded, some with log-probabilities or penalties; they end by their number of tokens only."""
    fixed = {"ignore_eos": True, "stop": None, "max_tokens": max_tokens}
    return [Ask({**ask.body, **fixed}) for ask in plan(seed, count, prompt_len=(60, 500))]


async def num_running(stack: Stack) -> float:
    return await counter(stack.workers("decode"), "vllm:num_requests_running")


def problems(heard: list[Heard], expected: list[Heard]) -> list[str]:
    return [why for one, should in zip(heard, expected, strict=True) if (why := difference(one, should))]


async def test_a_frozen_router_goes_on_when_it_wakes_up(stacks: Any) -> None:
    stack: Stack = stacks(
        1,
        2,
        routers=2,
        worker_flags=("--router-timeout-s", str(ROUTER_TIMEOUT_S)),
        router_flags=("--local-prefill-threshold", "0", "--worker-timeout-s", str(WORKER_TIMEOUT_S)),
    )
    decode = stack.workers("decode")
    sleeper, other = stack.routers
    asks, others_asks = asks_of(3, NUM_FROZEN, max_tokens=NUM_TOKENS), asks_of(4, NUM_OTHER, max_tokens=60)

    async def all_run() -> bool:
        return await counter(decode, "vllm:num_requests_running") >= NUM_FROZEN

    async def nothing_owned() -> bool:
        return not await counter(stack.workers(), "diptych_kv_blocks", 'state="owned"')

    async def all_noticed() -> bool:
        return all("is silent for" in worker.log.read_text() for worker in stack.workers())

    async with Client(sleeper.http_url) as client, Client(other.http_url) as others:
        expected = await answers(client, asks, salt="before")
        others_expected = await answers(others, others_asks, salt="before")
        num_ended = await counter(decode, "vllm:request_success")

        asking = [asyncio.create_task(client.ask(ask, salt="frozen")) for ask in asks]
        await until(all_run, "the streams run")
        sleeper.pause()
        noticing = asyncio.create_task(until(all_noticed, "every worker takes the silent router for dead"))
        rounds = [await answers(others, others_asks, salt="meanwhile")]
        while not noticing.done():
            rounds.append(await answers(others, others_asks, salt=f"round {len(rounds)}"))
        await noticing
        await until(nothing_owned, "the workers dropped what the silent router had there")
        assert await counter(decode, "vllm:request_success") - num_ended < len(rounds) * NUM_OTHER + NUM_FROZEN
        sleeper.resume()
        heard = [await one for one in asking]

        assert not [problem for one in rounds for problem in problems(one, others_expected)]
        assert await counter([other], "diptych_retries") == 0  # nothing moved there
        assert not problems(heard, expected)
        assert await counter([sleeper], "diptych_retries") > 0
        again = await answers(client, others_asks, salt="after")
        assert not problems(again, others_expected)
        await settle(stack)
