"""A request for many choices delays no other while it starts and while its answer is written."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from common.errors import Unavailable
from router.api.openai.chat import ChatFormatter
from router.dispatch.client import GenerationRequest, TokenEvent
from router.generation.answer_serializer import OpenAISerializer
from router.generation.budgets import LoopTimeBudget
from router.generation.choice import AnswerChoice, Piece
from router.generation.generation_response import MANY_LOGPROBS

from ..application import Engine


class Turns(Engine):
    """Records in which turn of the event loop each choice began."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.turn = 0
        self.began: list[int] = []
        self.ended: list[int] = []

    async def count(self) -> None:
        while True:
            self.turn += 1
            await asyncio.sleep(0)

    async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenEvent]:
        self.began.append(self.turn)
        try:
            async for event in super().generate(request):
                yield event
        finally:
            self.ended.append(self.turn)


@pytest.fixture
async def turns() -> Any:
    engine = Turns()
    counting = asyncio.create_task(engine.count())
    yield engine
    counting.cancel()


@pytest.mark.parametrize("stream", [False, True])
async def test_each_choice_begins_in_a_turn_of_its_own(start: Any, turns: Turns, stream: bool) -> None:
    running = await start(turns)
    reply = await running.completion(prompt=["a", "b"], n=64, max_tokens=1, stream=stream)
    assert reply.status_code == 200
    assert len(turns.began) == len(set(turns.began)) == 128


@pytest.mark.slow
async def test_each_choice_is_aborted_in_a_turn_of_its_own(start: Any, turns: Turns, tools: Any) -> None:
    turns.hold_after = 1
    running = await start(turns)
    with pytest.raises(httpx.ReadTimeout):
        body = {"prompt": "hi", "n": 128, "max_tokens": 2}
        await running.http.post("/v1/completions", json=body, timeout=3.0)
    await tools.until(lambda: len(turns.ended) == 128)
    assert len(set(turns.ended)) == 128 and len(turns.aborted) == 128


async def test_the_choices_of_a_prompt_share_it(running: Any) -> None:
    await running.completion(prompt=["a", "b"], n=3, max_tokens=1, cache_salt="mine")
    of = {request.request_id.rpartition("-")[2]: request.prompt for request in running.engine.requests}
    assert of["0"] is of["1"] is of["2"] is not of["3"] is of["4"] is of["5"] is not None


@pytest.mark.parametrize("stream", [False, True])
async def test_no_more_choices_begin_once_one_is_refused(start: Any, tools: Any, stream: bool) -> None:
    running = await start(tools.Engine(error=Unavailable("no worker")))
    reply = await running.completion(n=128, stream=stream)
    assert reply.status_code == 503 and len(running.engine.requests) < 8


@pytest.fixture
def writers(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of the threads that wrote a choice."""
    names: set[str] = set()

    def noted(write: Any) -> Any:
        def call(*args: Any, **named: Any) -> Any:
            names.add(threading.current_thread().name.rstrip("0123456789_"))
            return write(*args, **named)

        return call

    for method in ("whole", "chunks"):
        monkeypatch.setattr(ChatFormatter, method, noted(getattr(ChatFormatter, method)))
    return names


async def test_many_log_probabilities_are_written_beside_the_event_loop(running: Any, writers: set[str]) -> None:
    few = (await running.chat(max_tokens=4, logprobs=True, top_logprobs=5)).json()
    assert writers == {"MainThread"}
    writers.clear()
    num_tokens = MANY_LOGPROBS // 6 + 1
    many = (await running.chat(max_tokens=num_tokens, logprobs=True, top_logprobs=5)).json()
    assert writers == {"text-long"}
    written = many["choices"][0]["logprobs"]["content"]
    assert len(written) == num_tokens and written[:4] == few["choices"][0]["logprobs"]["content"]


async def test_a_large_piece_of_a_stream_is_written_beside_the_event_loop(
    start: Any, tools: Any, writers: set[str]
) -> None:
    running = await start(tools.Engine(per_event=MANY_LOGPROBS))
    events = await running.events("/v1/chat/completions", max_tokens=MANY_LOGPROBS, logprobs=True)
    assert writers == {"MainThread"}
    writers.clear()
    events = await running.events("/v1/chat/completions", max_tokens=MANY_LOGPROBS, logprobs=True, top_logprobs=1)
    assert writers == {"text-long"}
    content = [token for event in events[:-1] for token in (event["choices"][0]["logprobs"] or {}).get("content", ())]
    assert len(content) == MANY_LOGPROBS


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_log_probabilities_wait_for_a_turn_with_time_and_text_does_not(
    start: Any, turns: Turns, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    running = await start(turns)
    ticks = itertools.count()  # each job takes the whole time of a turn
    running.app.state.router_state.logprob_time = LoopTimeBudget(1.0, clock=lambda: float(next(ticks)))
    with_logprobs: list[int] = []
    text_alone: list[int] = []
    chunk = OpenAISerializer.chunk

    def noted(self: OpenAISerializer, choice: AnswerChoice, piece: Piece) -> bytes:
        (with_logprobs if piece.with_logprobs else text_alone).append(turns.turn)
        return chunk(self, choice, piece)

    monkeypatch.setattr(OpenAISerializer, "chunk", noted)
    asked = {"logprobs": True, "top_logprobs": 1} if "chat" in path else {"logprobs": 1}
    many, plain = await asyncio.gather(
        running.events(path, n=16, max_tokens=6, **asked), running.events(path, max_tokens=12)
    )
    assert len(text_alone) >= 12 and max(text_alone) < max(with_logprobs)
    assert max(Counter(with_logprobs).values()) <= 2  # where the test counts a turn, and where the budget does, differ
    tokens: Counter[int] = Counter()
    for choice in itertools.chain.from_iterable(event["choices"] for event in many[:-1]):
        if choice["logprobs"] is not None:
            tokens[choice["index"]] += len(choice["logprobs"].get("content") or choice["logprobs"]["tokens"])
    assert tokens == dict.fromkeys(range(16), 6) and plain[-1] == "[DONE]"
