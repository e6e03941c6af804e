"""The prompts of an answer that has very many take turns, and make room for each other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from common.errors import DeadlineExceeded, Overloaded
from common.wire.sampling_params import SamplingParams
from router.dispatch.client import GenerationRequest, TokenEvent
from router.generation.generations import LimitedClient


class Pools:
    """Have room for `room` requests at a time, each of which takes until `go` is set, or a moment."""

    def __init__(self, room: int = 1000) -> None:
        self.room, self.there, self.peak, self.num_refused = room, 0, 0, 0
        self.deadlines: list[float] = []
        self.go = asyncio.Event()
        self.go.set()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        self.deadlines.append(request.deadline_s)
        if self.there >= self.room:
            self.num_refused += 1
            raise Overloaded("a new request would wait too long")
        self.there += 1
        self.peak = max(self.peak, self.there)
        try:
            await asyncio.sleep(0.001)
            await self.go.wait()
            yield TokenEvent((1,), finish_reason="stop")
        finally:
            self.there -= 1


def request(number: int, deadline_s: float = 60.0) -> GenerationRequest:
    return GenerationRequest(f"r{number}", [1], SamplingParams(max_tokens=1), deadline_s=deadline_s)


async def answer(client: LimitedClient, asked: GenerationRequest) -> list[TokenEvent]:
    async with aclosing(client.generate(asked)) as events:
        return [event async for event in events]


async def test_only_so_many_are_there_at_a_time() -> None:
    pools = Pools()
    client = LimitedClient(pools, 5)
    answers = await asyncio.gather(*(answer(client, request(number)) for number in range(40)))
    assert all(len(events) == 1 for events in answers) and pools.peak == 5
    assert 60 >= pools.deadlines[0] > pools.deadlines[-1], "the wait is taken off a request's time"


@pytest.mark.parametrize("room", [1, 3])
async def test_an_answer_that_fills_the_pools_itself_is_not_refused(room: int) -> None:
    pools = Pools(room)
    client = LimitedClient(pools, 8)
    answers = await asyncio.gather(*(answer(client, request(number)) for number in range(40)))
    assert all(len(events) == 1 for events in answers) and pools.peak == room
    assert pools.num_refused <= 8, "it asks for fewer places after each refusal"


async def test_pools_that_others_fill_refuse_it() -> None:
    client = LimitedClient(Pools(0), 8)
    with pytest.raises(Overloaded):
        await answer(client, request(0))


async def test_its_time_ends_here_too() -> None:
    pools = Pools()
    pools.go.clear()
    client = LimitedClient(pools, 1)
    first = asyncio.create_task(answer(client, request(0)))
    await asyncio.sleep(0.01)
    with pytest.raises(DeadlineExceeded, match="before all prompts started"):
        await answer(client, request(1, deadline_s=0.05))
    pools.go.set()
    assert len(await first) == 1


async def test_a_client_that_leaves_gives_its_places_back() -> None:
    pools = Pools()
    pools.go.clear()
    client = LimitedClient(pools, 2)
    tasks = [asyncio.create_task(answer(client, request(number))) for number in range(3)]
    await asyncio.sleep(0.01)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert pools.there == 0
    pools.go.set()
    assert len(await answer(client, request(9))) == 1
