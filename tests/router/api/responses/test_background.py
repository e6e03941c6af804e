"""Answers with `background: true`: polled, streamed, read again, cancelled; their bounds and their ends."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from common.errors import Unavailable
from common.machine.wall_clock import WallClock
from router.access.keys import digest_of
from router.api.responses import background as responses_background
from router.server.server import _drain
from router.stored import StoredResponse, StoreFailed

from ...sdk import client_of

ASKED: Any = {"model": "tiny-random", "input": "hi", "max_output_tokens": 9}


@pytest.fixture
def response_store() -> str:
    return "memory"


@pytest.fixture
async def held(start: Any, tools: Any) -> Any:
    """An application whose answers stop after two tokens, until `engine.go` is set."""
    return await start(tools.Engine(hold_after=2))


@pytest.fixture
async def sdk(held: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(held) as client:
        yield client


async def begun(running: Any, **fields: Any) -> str:
    """The id of a response in the background."""
    reply = await running.http.post("/v1/responses", json=ASKED | {"background": True} | fields)
    assert reply.status_code == 200, reply.text
    response = reply.json()
    assert (response["status"], response["background"], response["output"]) == ("queued", True, [])
    return str(response["id"])


async def shown(running: Any, name: str) -> Any:
    return (await running.http.get(f"/v1/responses/{name}")).json()


async def polled(running: Any, name: str, *states: str) -> Any:
    """The response once it is in one of the states."""
    async with asyncio.timeout(60):
        while (response := await shown(running, name)).get("status") not in states:  # noqa: ASYNC110 (clients poll)
            await asyncio.sleep(0.001)
    return response


def events_in(text: str) -> list[Any]:
    blocks = [block for block in text.split("\n\n") if block and not block.startswith(":")]
    return [json.loads(block.partition("data: ")[2]) for block in blocks]


def row_of(running: Any, name: str) -> Any:
    """What the store has of it, whatever this process remembers."""
    return running.app.state.responses.store.find(name, "")


@pytest.mark.slow
async def test_an_answer_that_is_polled(sdk: openai.AsyncOpenAI, held: Any, tools: Any) -> None:
    response = await sdk.responses.create(**ASKED, background=True)
    assert (response.status, response.background) == ("queued", True)
    while (now := await sdk.responses.retrieve(response.id)).status == "queued":
        pass
    assert now.status == "in_progress" and now.output == []
    stored, lapsed = await row_of(held, response.id)
    assert (stored.status, lapsed) == ("in_progress", False)
    held.engine.go.set()
    final = await polled(held, response.id, "incomplete")
    assert final["output"][0]["content"][0]["text"] == "The quick" and final["usage"]["output_tokens"] == 9
    await tools.until(lambda: not held.app.state.responses.background.num_running)
    held.app.state.responses.background.forget(response.id)
    assert await shown(held, response.id) == final
    followed = await sdk.responses.create(**ASKED, previous_response_id=response.id)
    assert followed.output_text == "The quick"


@pytest.mark.slow
async def test_it_outlives_its_clients_connection(held: Any) -> None:
    async with client_of(held) as other:
        name = (await other.responses.create(**ASKED, background=True)).id
    await polled(held, name, "in_progress")
    held.engine.go.set()
    assert (await polled(held, name, "incomplete"))["output"] and held.engine.aborted == []


async def test_an_answer_that_is_not_complete_cannot_be_continued(held: Any) -> None:
    name = await begun(held)
    reply = await held.http.post("/v1/responses", json=ASKED | {"previous_response_id": name})
    assert reply.status_code == 400 and "is not complete" in reply.json()["error"]["message"]


async def test_a_stream_and_the_same_events_again(sdk: openai.AsyncOpenAI, held: Any) -> None:
    held.engine.go.set()
    stream = await sdk.responses.create(**ASKED, background=True, stream=True)
    events = [event async for event in stream]
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:3] == ["created", "queued", "in_progress"] and kinds[-1] == "incomplete"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.response.status for event in events[:3]] == ["queued", "queued", "in_progress"]  # type: ignore[union-attr]
    name = events[0].response.id  # type: ignore[union-attr]
    for start in (0, 4, len(events) - 2):
        again = [event async for event in await sdk.responses.retrieve(name, stream=True, starting_after=start)]
        assert again == events[start + 1 :]
    assert [event async for event in await sdk.responses.retrieve(name, stream=True)] == events
    assert await sdk.responses.retrieve(name) == events[-1].response  # type: ignore[union-attr]


async def test_a_stream_that_broke_goes_on_elsewhere(sdk: openai.AsyncOpenAI, held: Any) -> None:
    stream = await sdk.responses.create(**ASKED, background=True, stream=True)
    seen: list[Any] = []
    async for event in stream:
        seen.append(event)
        if event.type == "response.output_text.delta" and len(seen) > 6:
            break
    await stream.close()
    name = seen[0].response.id
    reader = await sdk.responses.retrieve(name, stream=True, starting_after=seen[-1].sequence_number)
    held.engine.go.set()
    rest = [event async for event in reader]
    assert [event.sequence_number for event in (*seen, *rest)] == list(range(len(seen) + len(rest)))
    text = "".join(event.delta for event in (*seen, *rest) if event.type == "response.output_text.delta")
    assert text == rest[-1].response.output_text == "The quick"  # type: ignore[union-attr]
    assert held.engine.aborted == []


async def test_silence_in_a_stream_is_filled(start: Any, tools: Any) -> None:
    running = await start(tools.Engine(hold_after=0), keepalive_s=0.01)
    request = running.http.build_request("POST", "/v1/responses", json=ASKED | {"background": True, "stream": True})
    reply = await running.http.send(request, stream=True)
    seen = ""
    async for part in reply.aiter_text():
        seen += part
        if ": keep-alive\n\n" in seen:
            running.engine.go.set()
    assert [event["sequence_number"] for event in events_in(seen)] == list(range(len(events_in(seen))))


async def test_what_has_no_events_says_so(held: Any) -> None:
    name = await begun(held)
    plain = (await held.http.post("/v1/responses", json=ASKED | {"max_output_tokens": 1})).json()["id"]
    for one in (name, plain):
        reply = await held.http.get(f"/v1/responses/{one}?stream=true")
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "stream")
    assert (await held.http.get("/v1/responses/resp_none?stream=true")).status_code == 404
    for query, param in (("stream=maybe", "stream"), ("stream=true&starting_after=-1", "starting_after")):
        reply = await held.http.get(f"/v1/responses/{name}?{query}")
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


async def test_events_take_bounded_memory(held: Any, monkeypatch: Any) -> None:
    """Above the bound the answer goes on, and its events can no longer be read."""
    monkeypatch.setattr(responses_background, "MAX_EVENT_BYTES", 3000)
    monkeypatch.setattr(responses_background, "GROWTH_BYTES", 100)
    reply = await held.http.post("/v1/responses", json=ASKED | {"background": True, "stream": True})
    first = events_in(reply.text)[0]
    assert reply.text.startswith("event: response.created") and "response.incomplete" not in reply.text
    held.engine.go.set()
    name = first["response"]["id"]
    assert (await polled(held, name, "incomplete"))["output"][0]["content"][0]["text"] == "The quick"
    assert (await held.http.get(f"/v1/responses/{name}?stream=true")).status_code == 400


async def test_a_cancelled_answer(sdk: openai.AsyncOpenAI, held: Any) -> None:
    stream = await sdk.responses.create(**ASKED, background=True, stream=True)
    first = await anext(aiter(stream))
    name = first.response.id  # type: ignore[union-attr]
    await polled(held, name, "in_progress")
    cancelled = await sdk.responses.cancel(name)
    assert (cancelled.status, cancelled.error, cancelled.usage) == ("cancelled", None, None)
    assert len(held.engine.aborted) == 1
    assert await sdk.responses.cancel(name) == cancelled == await sdk.responses.retrieve(name)
    last = [event async for event in stream][-1]
    assert (last.type, last.response.status) == ("response.failed", "cancelled")  # type: ignore[union-attr]
    stored, _ = await row_of(held, name)
    assert stored.status == "cancelled"


async def test_only_answers_in_the_background_can_be_cancelled(held: Any) -> None:
    held.engine.go.set()
    plain = (await held.http.post("/v1/responses", json=ASKED)).json()
    reply = await held.http.post(f"/v1/responses/{plain['id']}/cancel")
    assert reply.status_code == 400 and "background: true" in reply.json()["error"]["message"]
    name = await begun(held)
    final = await polled(held, name, "incomplete")
    assert (await held.http.post(f"/v1/responses/{name}/cancel")).json() == final
    assert (await held.http.post("/v1/responses/resp_none/cancel")).status_code == 404


async def test_a_running_answer_that_is_deleted_ends(held: Any) -> None:
    name = await begun(held)
    await polled(held, name, "in_progress")
    assert (await held.http.delete(f"/v1/responses/{name}")).status_code == 200
    assert (await held.http.get(f"/v1/responses/{name}")).status_code == 404
    assert len(held.engine.aborted) == 1 and await row_of(held, name) is None


@pytest.mark.parametrize("after", [0, 3])
async def test_a_failure_is_a_state(start: Any, tools: Any, after: int) -> None:
    running = await start(tools.Engine(error=Unavailable("no worker"), error_after=after))
    name = await begun(running)
    failed = await polled(running, name, "failed")
    assert failed["error"] == {"code": "server_error", "message": "no worker"} and failed["output"] == []
    reply = await running.http.post("/v1/responses", json=ASKED | {"background": True, "stream": True})
    assert events_in(reply.text)[-1]["response"]["status"] == "failed"


async def test_a_wrong_request_is_refused_at_once(held: Any) -> None:
    for wrong in ({"max_output_tokens": 10**6}, {"temperature": 9}, {"input": [{"role": "user"}]}):
        reply = await held.http.post("/v1/responses", json=ASKED | {"background": True} | wrong)
        assert reply.status_code == 400
    assert not held.app.state.responses.background.num_running


@pytest.mark.parametrize(
    ("num_bytes", "failure", "status"),
    [(2**18, None, 413), (1, StoreFailed("full", "the disk is full"), 503)],
    ids=["too large", "full"],
)
async def test_a_response_that_the_store_rejects_is_not_charged(
    start: Any, monkeypatch: pytest.MonkeyPatch, num_bytes: int, failure: StoreFailed | None, status: int
) -> None:
    """Only a full store is worth another try."""
    running, charged = await start(response_store_mib=1), list[int]()

    async def fail(record: StoredResponse) -> None:
        assert failure is not None
        raise failure

    if failure is not None:
        monkeypatch.setattr(running.app.state.responses.store, "begin", fail)
    access = running.app.state.router_state.access
    monkeypatch.setattr(access, "take_prompt", lambda _, num_tokens: charged.append(num_tokens))
    monkeypatch.setattr(access, "spend", lambda _, num_tokens: charged.append(num_tokens))
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "a" * num_bytes}]}
    body = ASKED | {"input": [{"role": "user", "content": "hi"}, thought], "background": True}
    reply = await running.http.post("/v1/responses", json=body)
    assert reply.status_code == status and ("retry-after" in reply.headers) == (status == 503)
    assert reply.json()["error"]["param"] == "background"
    assert len(charged) == 2 and sum(charged) == 0


async def test_their_number_is_bounded(start: Any, tools: Any, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    entry = '[[key]]\nname = "{}"\nsha256 = "{}"\n'
    keys.write_text("".join(entry.format(name, digest_of(name.encode()).hex()) for name in ("alice", "bob")))
    running = await start(tools.Engine(hold_after=0), max_background=4, api_key_file=str(keys))
    async with client_of(running, "alice") as alice, client_of(running, "bob") as bob:
        names = [(await alice.responses.create(**ASKED, background=True)).id for _ in range(2)]
        with pytest.raises(openai.RateLimitError, match="2 of this key. The limits are 4 in total and 2 per key"):
            await alice.responses.create(**ASKED, background=True)
        others = [(await bob.responses.create(**ASKED, background=True)).id for _ in range(2)]
        for name in others:
            await bob.responses.cancel(name)
        with pytest.raises(openai.RateLimitError):
            await alice.responses.create(**ASKED, background=True)
        await alice.responses.cancel(names[0])
        assert (await alice.responses.create(**ASKED, background=True)).status == "queued"
    alone = await start(tools.Engine(hold_after=0), max_background=2)
    for _ in range(2):
        await begun(alone)
    reply = await alone.http.post("/v1/responses", json=ASKED | {"background": True})
    assert reply.status_code == 429 and "retry-after" in reply.headers
    assert await alone.metric("diptych_background_responses") == 2


async def test_many_that_come_at_once_are_bounded(start: Any, tools: Any) -> None:
    running = await start(tools.Engine(hold_after=0), max_background=2)
    asked = [running.http.post("/v1/responses", json=ASKED | {"background": True}) for _ in range(6)]
    statuses = sorted(reply.status_code for reply in await asyncio.gather(*asked))
    assert statuses == [200, 200, 429, 429, 429, 429]


async def test_an_answer_that_is_being_stored_can_be_continued(held: Any, tools: Any) -> None:
    name = await begun(held)
    await polled(held, name, "in_progress")
    disk = threading.Event()
    stuck = held.app.state.responses.store._database.submit(lambda connection: disk.wait(30))
    held.engine.go.set()
    await polled(held, name, "incomplete")
    following = asyncio.create_task(held.http.post("/v1/responses", json=ASKED | {"previous_response_id": name}))
    await tools.until(lambda: held.app.state.router_state.num_active == 2)
    disk.set()
    assert (await following).status_code == 200 and stuck.result(10)


@pytest.mark.slow
async def test_it_keeps_its_keys_place_until_its_end(start: Any, tools: Any, tmp_path: Path) -> None:
    keys, audit = tmp_path / "keys.toml", tmp_path / "audit.log"
    keys.write_text(f'[[key]]\nname = "a"\nsha256 = "{digest_of(b"a").hex()}"\nconcurrent_requests = 1\n')
    running = await start(tools.Engine(hold_after=2), api_key_file=str(keys), audit_log=str(audit))
    async with client_of(running, "a") as sdk:
        await sdk.responses.create(**ASKED, background=True)
        with pytest.raises(openai.RateLimitError, match="limit 1 concurrent requests"):
            await sdk.models.list()
        running.engine.go.set()
        await tools.until(lambda: not running.app.state.responses.background.num_running)
        await sdk.models.list()
    await tools.until(lambda: audit.read_text().count("\n") == 4)
    lines = {line["method"]: line for line in map(json.loads, audit.read_text().splitlines())}
    assert (lines["BACKGROUND"]["output_tokens"], lines["BACKGROUND"]["status"]) == (9, 200)
    assert lines["BACKGROUND"]["path"] == "/v1/responses"


async def test_a_router_that_ends_says_so(held: Any) -> None:
    name = await begun(held)
    await polled(held, name, "in_progress")
    router_state = held.app.state.router_state
    assert router_state.num_active == 1  # so that the drain waits for it
    await held.app.state.responses.background.close()
    cancelled = await shown(held, name)
    assert cancelled["status"] == "cancelled" and "shut down" in cancelled["error"]["message"]
    stored, _ = await row_of(held, name)
    assert stored.status == "cancelled" and router_state.num_active == 0


async def test_a_drain_waits_for_answers_in_the_background(held: Any) -> None:
    name = await begun(held)
    await polled(held, name, "in_progress")
    draining = asyncio.create_task(_drain(held.app.state.router_state, lambda idle_s: False))
    await asyncio.sleep(0)
    assert (await shown(held, name))["status"] == "in_progress" and not draining.done()
    held.engine.go.set()
    await draining
    assert (await shown(held, name))["status"] == "incomplete"


async def test_after_a_crash_it_reads_as_failed(start: Any, tools: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "r.sqlite3")
    crashed, other = await start(tools.Engine(hold_after=2), response_store=path), await start(response_store=path)
    name = await begun(crashed)
    await polled(other, name, "in_progress")
    store = crashed.app.state.responses.store
    store._running.clear()  # as if it renewed its leases no more
    other.app.state.responses.store._clock = WallClock(lambda: time.time() + 60)
    failed = await shown(other, name)
    assert failed["status"] == "failed" and "stopped before the response was complete" in failed["error"]["message"]
    assert (await other.http.post(f"/v1/responses/{name}/cancel")).json()["status"] == "failed"
    reply = await other.http.post("/v1/responses", json=ASKED | {"previous_response_id": name})
    assert reply.status_code == 400


async def test_another_router_cancels_it(start: Any, tools: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "r.sqlite3")
    mine, other = await start(tools.Engine(hold_after=2), response_store=path), await start(response_store=path)
    name = await begun(mine)
    await polled(other, name, "in_progress")
    assert (await other.http.post(f"/v1/responses/{name}/cancel")).json()["status"] == "in_progress"
    store = mine.app.state.responses.store
    await asyncio.wrap_future(store._database.submit(store._maintain))
    assert (await polled(other, name, "cancelled"))["error"] is None
    assert len(mine.engine.aborted) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_another_router_deletes_it(start: Any, tools: Any, tmp_path: Path, stream: bool) -> None:
    path = str(tmp_path / "r.sqlite3")
    mine, other = await start(tools.Engine(hold_after=2), response_store=path), await start(response_store=path)
    body = ASKED | {"background": True, "stream": stream}
    reading = asyncio.create_task(mine.http.post("/v1/responses", json=body))
    background = mine.app.state.responses.background
    await tools.until(lambda: background._answers)
    (name,) = background._answers
    await polled(other, name, "in_progress")
    assert (await other.http.delete(f"/v1/responses/{name}")).status_code == 200
    store = mine.app.state.responses.store
    await asyncio.wrap_future(store._database.submit(store._maintain))
    await tools.until(lambda: not background.num_running)
    assert (await reading).status_code == 200 and len(mine.engine.aborted) == 1
    assert (await mine.http.get(f"/v1/responses/{name}")).status_code == 404


async def test_an_answer_that_cannot_be_stored_is_there_for_minutes(held: Any, caplog: Any) -> None:
    caplog.set_level(logging.ERROR)
    name = await begun(held)
    await polled(held, name, "in_progress")
    held.app.state.responses.store._database.close()
    held.engine.go.set()
    final = await polled(held, name, "incomplete")
    assert final["output"][0]["content"][0]["text"] == "The quick"
    assert "store of responses: the store is closed" in caplog.text


async def test_copies_of_ended_answers_are_bounded(start: Any, tools: Any, monkeypatch: Any) -> None:
    """Only of those whose events can be read again; of others none stays."""
    monkeypatch.setattr(responses_background, "MAX_ENDED", 2)
    running = await start()
    background = running.app.state.responses.background
    names = []
    for _ in range(4):
        reply = await running.http.post("/v1/responses", json=ASKED | {"background": True, "stream": True})
        names.append(events_in(reply.text)[0]["response"]["id"])
        await tools.until(lambda: not background.num_running)
    await polled(running, await begun(running), "incomplete")
    await tools.until(lambda: not background.num_running)
    assert [*background._answers] == names[2:]
    assert (await shown(running, names[0]))["status"] == "incomplete"


@pytest.mark.slow
async def test_the_clients_own_helper_reads_events_again(start: Any, tools: Any) -> None:
    running = await start(tools.Engine(eos_after=9))
    async with client_of(running) as sdk:
        made = await sdk.responses.create(model="tiny-random", input="hi", background=True, stream=True)
        events = [event async for event in made]
        name = events[0].response.id  # type: ignore[union-attr]
        async with sdk.responses.stream(response_id=name, starting_after=5) as stream:
            again = [event async for event in stream]
            final = await stream.get_final_response()
    assert [event.sequence_number for event in again] == list(range(6, len(events)))
    assert final.output_text == "The quick" and final.id == name
