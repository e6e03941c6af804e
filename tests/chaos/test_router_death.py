"""A router that is killed: only its own clients notice, and its requests leave nothing on any worker."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from .streams import Ask, Client, answers, difference, plan
from .watch import counter, settle, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300), pytest.mark.slow]

ROUTER_TIMEOUT_S = 1.0


def without_stops(count: int, seed: int, **limits: int) -> list[Ask]:
    """Asks that end by their number of tokens only."""
    never = {"ignore_eos": True, "stop": None}
    return [Ask({**ask.body, **never, **limits}) for ask in plan(seed, count, prompt_len=(100, 600))]


async def test_a_killed_router_leaves_no_orphan(stacks: Any) -> None:
    flags = ("--router-timeout-s", str(ROUTER_TIMEOUT_S))
    stack = stacks(1, 2, routers=2, worker_flags=flags, router_flags=("--local-prefill-threshold", "0"))
    doomed, other = stack.routers
    decode = stack.workers("decode")
    asks = without_stops(12, seed=3, max_tokens=60)

    async def all_run() -> bool:
        return await counter(decode, "vllm:num_requests_running") >= len(lost)

    async def nothing_owned() -> bool:
        return not await counter(decode, "diptych_kv_blocks", 'state="owned"')

    async with Client(other.http_url) as staying, Client(doomed.http_url) as leaving:
        expected = await answers(staying, asks, salt="before")
        num_finished = await counter(decode, "vllm:request_success")
        async with asyncio.TaskGroup() as tasks:
            lost = [tasks.create_task(leaving.ask(ask)) for ask in without_stops(24, seed=4, max_tokens=1400)]
            await until(all_run, "the streams run")
            kept = [tasks.create_task(staying.ask(ask, salt="during")) for ask in asks]
            await asyncio.to_thread(doomed.kill)
        assert all("connection" in one.result().error for one in lost)
        assert [difference(one.result(), should) for one, should in zip(kept, expected, strict=True)] == [""] * 12

        await until(nothing_owned, "no block is owned by a request that nobody waits for")
        # They were dropped, not generated to their end. One or the other may have ended before the worker noticed.
        assert await counter(decode, "vllm:request_success") - num_finished < len(asks) + len(lost) / 2

        stack.restart(doomed)
        await asyncio.to_thread(stack.wait_ready, time.monotonic() + 60)
        again = await answers(leaving, asks, salt="after")
        assert [difference(one, should) for one, should in zip(again, expected, strict=True)] == [""] * 12
        await settle(stack)
