"""Responses that are stored: shown, listed, deleted, continued; by the official client and by hand."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import openai
import pytest

from router.access.keys import digest_of
from router.stored.errors import StoreFailed

from ...sdk import client_of

CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
TOOLS: Any = [{"type": "function", "name": "now", "parameters": {"type": "object"}, "strict": False}]


@pytest.fixture
def response_store() -> str:
    return "memory"


async def post(running: Any, **fields: Any) -> Any:
    return await running.http.post("/v1/responses", json={"input": "hi", "max_output_tokens": 9, **fields})


async def answered(running: Any, **fields: Any) -> Any:
    reply = await post(running, **fields)
    assert reply.status_code == 200, reply.text
    return reply.json()


def messages_of(running: Any) -> str:
    """The last prompt as text: the tiny model's tokens are bytes."""
    return bytes(token for token in running.engine.requests[-1].prompt_token_ids if token < 256).decode()


async def test_a_response_is_shown_as_it_was(sdk: openai.AsyncOpenAI) -> None:
    made = await sdk.responses.create(model="tiny-random", input="hi", max_output_tokens=9, metadata={"a": "b"})
    assert await sdk.responses.retrieve(made.id) == made
    assert made.model_extra is not None and made.model_extra["store"] is True and made.id.startswith("resp_")


async def test_a_streamed_response_is_stored_with_the_ids_of_its_events(sdk: openai.AsyncOpenAI) -> None:
    async with sdk.responses.stream(model="tiny-random", input="hi", max_output_tokens=9) as stream:
        events = [event async for event in stream]
    final = events[-1].response  # type: ignore[union-attr]
    stored = await sdk.responses.retrieve(final.id)
    assert stored.model_dump(exclude={"output"}) == final.model_dump(exclude={"output"})
    assert stored.output_text == "The quick"
    named = {event.item_id for event in events if hasattr(event, "item_id")}
    assert named == {stored.output[0].id} and stored.output[0].id.startswith("msg_")  # type: ignore[union-attr]
    assert [event.sequence_number for event in events] == list(range(len(events)))


async def test_the_ids_of_calls(start: Any, tools: Any) -> None:
    running = await start(tools.Engine(text=CALL, eos_after=len(CALL)))
    call = (await answered(running, tools=TOOLS, max_output_tokens=900))["output"][0]
    assert call["id"].startswith("fc_") and call["call_id"].startswith("call_")


async def test_what_must_not_be_stored_is_not(running: Any) -> None:
    made = await answered(running, store=False)
    assert made["store"] is False
    reply = await running.http.get(f"/v1/responses/{made['id']}")
    assert reply.status_code == 404
    error = reply.json()["error"]
    assert error["code"] == "response_not_found" and "a router with a separate store" in error["message"]
    reply = await post(running, previous_response_id=made["id"])
    assert reply.status_code == 404
    error = reply.json()["error"]
    assert (error["param"], error["code"]) == ("previous_response_id", "previous_response_not_found")
    assert "a router with a separate store" in error["message"]


@pytest.mark.slow
async def test_a_conversation_goes_on(running: Any) -> None:
    """The prompt is that of the whole conversation; instructions are of one request only."""
    first = await answered(running, input="one", instructions="Be brief.")
    second = await answered(running, input="two", previous_response_id=first["id"], instructions="Be loud.")
    third = await answered(running, input=[{"role": "user", "content": "three"}], previous_response_id=second["id"])
    assert third["previous_response_id"] == second["id"] and third["instructions"] is None
    said = [("user", "one"), ("assistant", "The quick"), ("user", "two"), ("assistant", "The quick"), ("user", "three")]
    await running.chat(messages=[{"role": role, "content": text} for role, text in said])
    continued, whole = (request.prompt_token_ids for request in running.engine.requests[-2:])
    assert continued == whole
    system = [("system", "Be loud."), *said[:3]]
    await running.chat(messages=[{"role": role, "content": text} for role, text in system])
    assert running.engine.requests[1].prompt_token_ids == running.engine.requests[-1].prompt_token_ids


@pytest.mark.slow
async def test_a_conversation_with_calls_goes_on(start: Any, tools: Any) -> None:
    running = await start(tools.Engine(text=CALL, eos_after=len(CALL)))
    async with client_of(running) as sdk:
        asked = await sdk.responses.create(model="tiny-random", input="the time?", tools=TOOLS)
        (call,) = asked.output
        assert call.type == "function_call"
        output: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "noon"}]
        running.engine.text, running.engine.eos_after = "At noon.", 8
        told = await sdk.responses.create(model="tiny-random", input=output, previous_response_id=asked.id, tools=TOOLS)
        assert told.output_text == "At noon."
        prompt = messages_of(running)
        assert (
            prompt.index("the time?") < prompt.index('"name": "now"', prompt.index("the time?")) < prompt.index("noon")
        )
        items = [item async for item in sdk.responses.input_items.list(told.id, order="asc")]
        assert [item.type for item in items] == ["message", "function_call", "function_call_output"]
        assert items[1].id == call.id and len({item.id for item in items}) == 3  # type: ignore[union-attr]


async def test_two_ways_go_on_from_one_response(running: Any) -> None:
    first = await answered(running, input="one")
    for text in ("left", "right"):
        await answered(running, input=text, previous_response_id=first["id"])
        assert "one" in messages_of(running) and text in messages_of(running)
    assert "left" not in messages_of(running)


async def test_a_response_that_was_cut_off_can_be_continued_and_a_failed_one_not(start: Any) -> None:
    running = await start()
    cut = await answered(running)
    assert cut["status"] == "incomplete"
    await answered(running, previous_response_id=cut["id"])
    running.engine.error, running.engine.error_after = RuntimeError("x"), 2
    reply = await post(running, stream=True)
    failed = json.loads(reply.text.rsplit("data: ", 1)[1])["response"]
    assert failed["status"] == "failed" and failed["error"]["code"] == "server_error"
    assert (await running.http.get(f"/v1/responses/{failed['id']}")).json()["status"] == "failed"
    running.engine.error = None
    reply = await post(running, previous_response_id=failed["id"])
    assert reply.status_code == 400 and "its status is 'failed'" in reply.json()["error"]["message"]


async def test_input_items_come_in_pages(sdk: openai.AsyncOpenAI) -> None:
    given: Any = [{"role": "user", "content": f"{i}"} for i in range(7)]
    given[3] |= {"id": "msg_mine", "type": "message"}
    given[5] |= {"id": "msg_mine", "type": "message"}
    made = await sdk.responses.create(model="tiny-random", input=given, max_output_tokens=2)
    for order, expected in (("asc", "0123456"), ("desc", "6543210")):
        items = [item async for item in sdk.responses.input_items.list(made.id, order=order, limit=2)]  # type: ignore[arg-type]
        assert "".join(item.content[0].text for item in items) == expected  # type: ignore[union-attr, index]
        assert len({item.id for item in items}) == 7  # type: ignore[union-attr]
    page = await sdk.responses.input_items.list(made.id, order="asc", limit=3, after="msg_mine")
    assert [item.content[0].text for item in page.data] == ["4", "5", "6"] and page.has_more is False  # type: ignore[union-attr, index]
    assert (page.first_id, page.last_id) == (page.data[0].id, page.data[2].id)  # type: ignore[attr-defined, union-attr]
    default = await sdk.responses.input_items.list(made.id)
    assert [item.content[0].text for item in default.data] == [*"6543210"]  # type: ignore[union-attr, index]


@pytest.mark.parametrize(
    ("query", "param"),
    [("limit=0", "limit"), ("limit=101", "limit"), ("limit=x", "limit"), ("order=up", "order"), ("after=zz", "after")],
)
async def test_wrong_pages_are_named(running: Any, query: str, param: str) -> None:
    made = await answered(running)
    reply = await running.http.get(f"/v1/responses/{made['id']}/input_items?{query}")
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


async def test_what_is_deleted_is_gone(sdk: openai.AsyncOpenAI, running: Any) -> None:
    first = await sdk.responses.create(model="tiny-random", input="one", max_output_tokens=2)
    second = await sdk.responses.create(
        model="tiny-random", input="two", max_output_tokens=2, previous_response_id=first.id
    )
    reply = await running.http.delete(f"/v1/responses/{first.id}")
    assert reply.json() == {"id": first.id, "object": "response", "deleted": True}
    for gone in (
        sdk.responses.retrieve(first.id), sdk.responses.delete(first.id), sdk.responses.input_items.list(first.id),
        sdk.responses.create(model="tiny-random", input="x", previous_response_id=first.id),
        sdk.responses.create(model="tiny-random", input="x", previous_response_id=second.id),
    ):  # fmt: skip
        with pytest.raises(openai.NotFoundError, match=first.id):
            await gone
    items = await sdk.responses.input_items.list(second.id)
    assert len(items.data) == 1
    assert (await sdk.responses.retrieve(second.id)).id == second.id


async def test_responses_belong_to_the_key_that_made_them(start: Any, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    entry = '[[key]]\nname = "{}"\nsha256 = "{}"\n'
    keys.write_text("".join(entry.format(name, digest_of(name.encode()).hex()) for name in ("alice", "bob")))
    running = await start(api_key_file=str(keys))
    async with client_of(running, "alice") as alice, client_of(running, "bob") as bob:
        made = await alice.responses.create(model="tiny-random", input="one", max_output_tokens=2)
        for asked in (
            bob.responses.retrieve(made.id), bob.responses.delete(made.id), bob.responses.cancel(made.id),
            bob.responses.input_items.list(made.id),
            bob.responses.create(model="tiny-random", input="x", previous_response_id=made.id),
        ):  # fmt: skip
            with pytest.raises(openai.NotFoundError, match="another API key"):
                await asked
        assert (await alice.responses.retrieve(made.id)).id == made.id
        assert (await running.http.get(f"/v1/responses/{made.id}")).status_code == 401


async def test_a_restarted_router_goes_on(start: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "r.sqlite3")
    first = await start(response_store=path)
    made = await answered(first, input="one")
    await first.app.state.responses.close()
    second = await start(response_store=path)
    assert (await second.http.get(f"/v1/responses/{made['id']}")).json() == made
    await answered(second, input="two", previous_response_id=made["id"])
    assert "one" in messages_of(second)


async def test_two_routers_share_a_file(start: Any, tmp_path: Path) -> None:
    one, other = [await start(response_store=str(tmp_path / "r.sqlite3")) for _ in range(2)]
    made = await answered(one, input="one")
    assert (await answered(other, previous_response_id=made["id"]))["status"] == "incomplete"
    assert "one" in messages_of(other)
    assert (await other.http.delete(f"/v1/responses/{made['id']}")).status_code == 200
    assert (await one.http.get(f"/v1/responses/{made['id']}")).status_code == 404


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_ends_once_another_router_can_read_it(start: Any, tmp_path: Path, stream: bool) -> None:
    """Its client's next turn may reach that one."""
    file = tmp_path / "r.sqlite3"
    one, other = [await start(response_store=str(file)) for _ in range(2)]
    writer = sqlite3.connect(file, isolation_level=None)
    writer.execute("BEGIN IMMEDIATE")  # nothing can be written meanwhile
    asked = asyncio.create_task(post(one, stream=stream))
    _, waiting = await asyncio.wait([asked], timeout=0.3)
    assert waiting
    writer.execute("COMMIT")
    body = (await asked).text
    writer.close()
    made = json.loads(body.strip().rpartition("data: ")[2])["response"] if stream else json.loads(body)
    assert (await other.http.get(f"/v1/responses/{made['id']}")).status_code == 200


@pytest.mark.slow
async def test_a_disk_that_is_stuck_keeps_no_answer_back(start: Any, tmp_path: Path) -> None:
    running = await start(response_store=str(tmp_path / "r.sqlite3"))
    with closing(sqlite3.connect(tmp_path / "r.sqlite3", isolation_level=None)) as writer:
        writer.execute("BEGIN IMMEDIATE")
        assert (await answered(running))["output"]


async def test_without_a_store_answers_are_as_ever(start: Any) -> None:
    running = await start(response_store="off")
    made = await answered(running, store=True)
    assert made["store"] is False
    for name, value in (("previous_response_id", made["id"]), ("background", True)):
        reply = await post(running, **{name: value})
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (400, name) and "--response-store off" in error["message"]
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
        reply = await running.http.request(method, f"/v1/responses/{made['id']}{path}")
        assert reply.status_code == 404 and "--response-store off" in reply.json()["error"]["message"]


async def test_a_store_that_fails_costs_no_answer(start: Any, tmp_path: Path) -> None:
    running = await start(response_store=str(tmp_path / "r.sqlite3"))
    kept = await answered(running)
    database = running.app.state.responses.store._database
    full = database.submit(lambda connection: connection.execute("PRAGMA max_page_count = 1").fetchall())
    await asyncio.wrap_future(full)
    large = {"metadata": {str(i): "x" * 500 for i in range(100)}}
    lost = await answered(running, **large)
    reply = await post(running, stream=True, **large)
    assert lost["output"] and "response.incomplete" in reply.text
    assert (await running.http.get(f"/v1/responses/{lost['id']}")).status_code == 404
    assert (await running.http.get(f"/v1/responses/{kept['id']}")).status_code == 200
    line = 'diptych_response_store_failures_total{engine="router",model_name="tiny-random",reason="full"'
    assert await running.metric(line) >= 2
    assert await running.metric("diptych_stored_responses") == 1
    reply = await post(running, background=True, **large)
    assert reply.status_code == 503 and "background" in reply.json()["error"]["message"]
    database.close()
    assert (await answered(running))["output"]
    assert (await running.http.get(f"/v1/responses/{kept['id']}")).status_code == 503
    with pytest.raises(StoreFailed):
        await running.app.state.responses.store.find(kept["id"], "")


async def test_a_conversation_above_the_bounds_is_refused(start: Any) -> None:
    running = await start(max_body_bytes=2048)
    made = await answered(running, input="x" * 900)
    for _ in range(3):
        made = await answered(running, input="", previous_response_id=made["id"])
    reply = await post(running, previous_response_id=made["id"])
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, "previous_response_id") and "2,048" in error["message"]


async def test_the_number_of_items_of_a_conversation_is_bounded(start: Any, monkeypatch: Any) -> None:
    running = await start()
    monkeypatch.setattr("router.api.responses.service.MAX_MESSAGES", 4)
    made = await answered(running)
    made = await answered(running, previous_response_id=made["id"])
    reply = await post(running, previous_response_id=made["id"])
    assert reply.status_code == 400 and "has 5 items" in reply.json()["error"]["message"]


async def test_a_long_conversation_is_read_apart(running: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("router.api.responses.service.MANY_BYTES", 0)
    made = await answered(running, input="one")
    made = await answered(running, previous_response_id=made["id"])
    assert "one" in messages_of(running)
    items = (await running.http.get(f"/v1/responses/{made['id']}/input_items")).json()["data"]
    assert len(items) == 3


async def test_errors_name_the_clients_own_items(running: Any) -> None:
    made = await answered(running)
    reply = await post(running, previous_response_id=made["id"], input=[{"role": "user"}])
    assert "input[0]: a message must have" in reply.json()["error"]["message"]


async def test_thoughts_are_stored_and_not_shown_to_the_model_again(running: Any) -> None:
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    made = await answered(running, input=[thought, {"role": "user", "content": "one"}])
    await answered(running, previous_response_id=made["id"])
    assert "hm" not in messages_of(running)
    items = (await running.http.get(f"/v1/responses/{made['id']}/input_items?order=asc")).json()["data"]
    assert items[0] == thought | {"status": "completed"}


async def test_log_probabilities_are_shown_again_and_are_no_part_of_the_conversation(running: Any) -> None:
    made = await answered(running, top_logprobs=1)
    assert made["output"][0]["content"][0]["logprobs"]
    assert (await running.http.get(f"/v1/responses/{made['id']}")).json() == made
    (turn,) = await running.app.state.responses.store.conversation(made["id"], "", 10**6)
    assert b"logprobs" not in turn.output and b"The quick" in turn.output
    await answered(running, previous_response_id=made["id"])
    assert "The quick" in messages_of(running)
