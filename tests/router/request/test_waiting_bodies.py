"""Requests wait as tokens, not as the objects of their bodies. Bodies wait as bytes for memory for their objects."""

from __future__ import annotations

import asyncio
import functools
import gc
import json
from typing import Any

import pytest

from common.errors import Unavailable
from router.api.anthropic.fields import Block, Turn
from router.api.responses.fields import Item, Part
from router.request import body as request_body
from router.request.body import OBJECT_BYTES, BodyBudget
from router.request.fields import ContentPart, Message

from ... import waiting
from ..application import Engine, Start

NUM = 1500
SAID = [{"role": "user", "content": "a"}] * NUM
PARTS = [{"role": "user", "content": [{"type": "text", "text": "a"}] * NUM}]
KEEP = {"truncate_prompt_tokens": 100}
ASKED = {
    "messages": ("/v1/chat/completions", {"max_tokens": 1, "messages": SAID}),
    "parts": ("/v1/chat/completions", {"max_tokens": 1, "messages": PARTS, "echo": True, "stop": ["!"]}),
    "invocation": ("/invocations", {"max_tokens": 1, "messages": SAID}),
    "items": ("/v1/responses", {"max_output_tokens": 16, "input": SAID}),
    "streamed items": ("/v1/responses", {"max_output_tokens": 16, "input": SAID, "stream": True}),
    "items in the background": ("/v1/responses", {"max_output_tokens": 16, "input": SAID, "background": True}),
    "turns": ("/v1/messages", {"max_tokens": 1, "messages": SAID}),
    "blocks": ("/v1/messages", {"max_tokens": 1, "messages": PARTS}),
}


@pytest.fixture
def response_store() -> str:
    return "memory"


def num_parsed() -> int:
    """Messages and parts that exist."""
    gc.collect()
    kinds = (Message, ContentPart, Item, Part, Turn, Block)
    return sum(isinstance(each, kinds) for each in gc.get_objects())


until = functools.partial(waiting.until, patience_s=30.0)


@pytest.mark.parametrize("name", ASKED)
async def test_a_conversation_is_released_when_it_is_tokens(start: Start, name: str) -> None:
    running = await start(Engine(hold_after=0))
    path, body = ASKED[name]
    before = num_parsed()
    answer = asyncio.create_task(running.http.post(path, json={**body, **KEEP}))
    await until(lambda: running.engine.requests)
    await until(lambda: num_parsed() - before < 10)  # one in the background may begin before its request is answered
    assert running.app.state.router_state.bodies.object_bytes == 0
    running.engine.go.set()
    assert (await answer).status_code == 200


async def test_prompts_wait_as_arrays(start: Start) -> None:
    running = await start(Engine(hold_after=0))
    answer = asyncio.create_task(running.completion(prompt=[[5000 % 256] * 300] * 2, max_tokens=1))
    await until(lambda: len(running.engine.requests) == 2)
    for request in running.engine.requests:
        assert memoryview(request.prompt_token_ids).nbytes == 4 * 300
    running.engine.go.set()
    assert (await answer).status_code == 200


def fully_used(budget: BodyBudget) -> None:
    """As if other bodies were being rendered."""
    budget.object_bytes = OBJECT_BYTES


async def test_a_body_waits_for_memory_and_a_small_one_does_not(start: Start) -> None:
    running = await start()
    budget = running.app.state.router_state.bodies
    fully_used(budget)
    large = asyncio.create_task(running.chat(messages=SAID, max_tokens=1, **KEEP))
    await until(lambda: budget._waiting)
    assert (await running.chat(messages=SAID[:100], max_tokens=1, **KEEP)).status_code == 200
    assert not large.done()
    budget.release_objects(OBJECT_BYTES)
    assert (await large).status_code == 200
    assert budget.object_bytes == budget.num_bytes == 0


async def test_a_body_that_waits_too_long_is_refused(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_body, "OBJECTS_TIMEOUT_S", 0.05)
    running = await start()
    budget = running.app.state.router_state.bodies
    fully_used(budget)
    refused = await running.chat(messages=SAID, max_tokens=1)
    assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
    assert f"{OBJECT_BYTES:,}" in refused.json()["error"]["message"]
    assert (budget.object_bytes, budget.num_bytes, len(budget._waiting)) == (OBJECT_BYTES, 0, 0)


async def test_bodies_get_memory_in_their_order_and_one_always_fits() -> None:
    budget, order = BodyBudget(1000), []

    async def reserve(name: str, num_bytes: int) -> None:
        await budget.reserve_objects(num_bytes)
        order.append(name)

    async with asyncio.TaskGroup() as group:
        for name, num_bytes in (("huge", 2 * OBJECT_BYTES), ("second", OBJECT_BYTES), ("third", 1)):
            group.create_task(reserve(name, num_bytes))
        gone = asyncio.create_task(reserve("gone", OBJECT_BYTES))
        await asyncio.sleep(0)
        assert order == ["huge"]
        await asyncio.sleep(0)
        gone.cancel()
        budget.release_objects(2 * OBJECT_BYTES)
        await asyncio.sleep(0.01)
        assert order == ["huge", "second"]
        budget.release_objects(OBJECT_BYTES)
    assert order == ["huge", "second", "third"] and budget.object_bytes == 1


async def test_memory_granted_to_a_client_that_left_is_released() -> None:
    budget = BodyBudget(1000)
    fully_used(budget)
    waiter = asyncio.create_task(budget.reserve_objects(OBJECT_BYTES))
    await asyncio.sleep(0)
    budget.release_objects(OBJECT_BYTES)
    assert budget.object_bytes == OBJECT_BYTES
    waiter.cancel()  # in the turn in which it gets the memory
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert budget.object_bytes == 0


async def test_a_client_that_leaves_loses_its_turn() -> None:
    budget = BodyBudget(1000)
    fully_used(budget)
    waiters = [asyncio.create_task(budget.reserve_objects(OBJECT_BYTES)) for _ in range(2)]
    await asyncio.sleep(0)
    waiters[0].cancel()
    budget.release_objects(OBJECT_BYTES)  # before the cancelled task runs
    await waiters[1]
    assert waiters[0].cancelled() and (budget.object_bytes, len(budget._waiting)) == (OBJECT_BYTES, 0)


async def test_tools_count_until_the_answer_ends(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_body, "UNCOUNTED_REST_BYTES", 1000)
    running = await start(Engine(hold_after=0))
    budget = running.app.state.router_state.bodies
    names = [f"name {i}" for i in range(5000)]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"enum": names}}}}}
    answer = asyncio.create_task(running.chat(tools=[tool], max_tokens=1, **KEEP))
    await until(lambda: running.engine.requests)
    assert budget.num_bytes > len(json.dumps(names))
    running.engine.go.set()
    assert (await answer).status_code == 200
    assert budget.num_bytes == 0


async def test_many_ordinary_bodies_never_wait(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: Any) -> None:
        raise Unavailable("waits")

    monkeypatch.setattr(BodyBudget, "reserve_objects", refuse)
    running = await start()
    messages = [{"role": "user", "content": f"{i}, and so on"} for i in range(100)]
    answers = await asyncio.gather(*(running.chat(messages=messages, max_tokens=1, **KEEP) for _ in range(40)))
    assert {answer.status_code for answer in answers} == {200}


async def test_a_stored_conversation_is_counted(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    running = await start()
    budget = running.app.state.router_state.bodies

    async def ask(**fields: Any) -> Any:
        return await running.http.post("/v1/responses", json={"max_output_tokens": 16, **KEEP, **fields})

    first = (await ask(input=SAID)).json()["id"]
    fully_used(budget)
    refused = await ask(input="and?", previous_response_id=first)
    assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
    budget.release_objects(OBJECT_BYTES)
    assert (await ask(input="and?", previous_response_id=first)).status_code == 200
    assert (budget.object_bytes, budget.num_bytes) == (0, 0)
