"""The unread answers of clients that read slower than tokens come are small, and bounded over all clients."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

from common.errors import Unavailable
from common.wire.sampling_params import SamplingParams, TokenLogprobs
from router.dispatch.client import GenerationRequest, TokenEvent
from router.generation.budgets import UnreadBudget
from router.generation.generations import MAX_WAITING, Generations
from router.generation.logprobs import PackedLogprobs

from ..application import Engine

PARAMS = SamplingParams(max_tokens=10_000, logprobs=20)
LOGPROBS = [
    TokenLogprobs(-0.1 * i, tuple((place, -float(place) / 3) for place in range(i % 4, 21 - i % 3))) for i in range(50)
]


class Fast:
    """Generates `count` tokens for each choice, even if no client reads them."""

    def __init__(self, count: int, alternatives: int = 20) -> None:
        self.count, self.alternatives = count, alternatives
        self.num_given = self.num_ended = 0

    async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenEvent]:
        try:
            for i in range(self.count):
                top = tuple((i + place, -1.0 - place) for place in range(self.alternatives))
                logprobs = (TokenLogprobs(-float(i), top),) if self.alternatives else ()
                reason = "length" if i == self.count - 1 else ""
                self.num_given += 1
                yield TokenEvent((i,), logprobs, reason)
                await asyncio.sleep(0)
        finally:
            self.num_ended += 1


def requests(count: int) -> list[GenerationRequest]:
    return [GenerationRequest(f"r-{i}", [1], PARAMS) for i in range(count)]


async def started(client: Any, budget: UnreadBudget, count: int = 1) -> Generations:
    """Generations whose client reads only after their end."""
    generations = Generations(client, budget)
    await generations.start(requests(count))
    while client.num_ended < count:  # noqa: ASYNC110 (no event tells of a change)
        await asyncio.sleep(0.001)
    return generations


async def test_packed_log_probabilities_are_the_same() -> None:
    packed = PackedLogprobs(LOGPROBS[:20])
    packed.extend(LOGPROBS[20:])
    assert list(packed) == LOGPROBS and len(packed) == 50
    assert packed[-1] == LOGPROBS[-1] and packed[3:5] == LOGPROBS[3:5]
    with pytest.raises(IndexError):
        packed[50]
    whole = PackedLogprobs([TokenLogprobs(-1.0, tuple((i, -2.0) for i in range(20)))] * 1000)
    arrays = sum(sys.getsizeof(getattr(whole, name)) for name in whole.__slots__)
    assert whole.num_bytes <= arrays < 1.2 * whole.num_bytes < 320_000


@pytest.mark.parametrize("alternatives", [0, pytest.param(20, marks=pytest.mark.slow)])
async def test_tokens_that_wait_are_joined_and_none_is_lost(alternatives: int) -> None:
    budget = UnreadBudget()
    generations = await started(Fast(3000, alternatives), budget, count=2)
    held = budget.num_bytes
    assert held < 2 * 3000 * (40 + 20 + 12 * alternatives) + 2 * MAX_WAITING * 1000 + 1
    arrivals = await generations.next(10)
    assert len(arrivals) == 2 * MAX_WAITING and budget.num_bytes == 0
    for index in (0, 1):
        events = [arrival.event for arrival in arrivals if arrival.index == index]
        assert [token for event in events for token in event.token_ids] == list(range(3000))
        assert [event.finish_reason for event in events] == [""] * (MAX_WAITING - 1) + ["length"]
        logprobs = [one for event in events for one in event.logprobs]
        assert [one.logprob for one in logprobs] == [-float(i) for i in range(3000 if alternatives else 0)]
        assert all(len(one.top) == 20 and one.top[3] == (i + 3, -4.0) for i, one in enumerate(logprobs))
    await generations.close()


async def test_the_answer_that_holds_most_is_given_up() -> None:
    budget = UnreadBudget(most=400_000)
    slow_client, quick_client = Fast(2000), Fast(1500)
    slow = Generations(slow_client, budget)
    await slow.start(requests(1))
    quick = Generations(quick_client, budget)
    await quick.start(requests(1))
    tokens: list[int] = []
    while len(tokens) < 1500:
        tokens += [token for arrival in await quick.next(10) for token in arrival.event.token_ids]
    assert tokens == list(range(1500))
    (arrival,) = await slow.next(10)
    assert isinstance(arrival.error, Unavailable) and "The client reads too slowly" in arrival.error.message
    assert slow_client.num_given < 2000 and slow_client.num_ended == 1
    assert budget.num_bytes == 0
    for generations in (slow, quick):
        await generations.close()


@pytest.mark.parametrize("how", ["leave", "close"])
async def test_a_client_that_leaves_leaves_nothing(how: str) -> None:
    budget = UnreadBudget()
    generations = await started(Fast(100), budget)
    assert budget.num_bytes
    if how == "leave":
        generations.leave()
    await generations.close()
    assert budget.num_bytes == 0


class Flood(Engine):
    """Generates forty thousand tokens as fast as the router takes them."""

    async def _events(self, request: GenerationRequest) -> AsyncIterator[TokenEvent]:
        top = tuple((65 + i, -1.0 - i) for i in range(20))
        for i in range(40_000):
            yield TokenEvent((97,), (TokenLogprobs(-1.0, top),), "length" if i == 39_999 else "")
            await asyncio.sleep(0)


@pytest.mark.slow
async def test_an_unread_stream_ends_with_an_error(start: Any, connect: Any) -> None:
    engine = Flood()
    running = await start(engine)
    budget = running.app.state.router_state.unread = UnreadBudget(most=1_000_000)
    reader, writer = await connect(running)
    reader._transport.pause_reading()
    body = b'{"prompt": "hi", "stream": true, "logprobs": 20, "max_tokens": 4000, "n": 2}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    writer.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
    async with asyncio.timeout(60):
        while len(engine.aborted) < 2:
            assert budget.num_bytes <= 1_000_000
            await asyncio.sleep(0.001)
        assert budget.num_bytes == 0
        reader._transport.resume_reading()
        text = b""
        while b"reads too slowly" not in text:
            text = text[-100:] + await reader.read(1 << 16)
