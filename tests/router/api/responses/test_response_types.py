"""Events, responses and items are what the official client's types say, to the letter: the client itself is lenient."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace
from openai.types.responses import Response, ResponseItemList, ResponseStreamEvent
from pydantic import TypeAdapter

from common.errors import InternalError
from common.model_files.files import ModelFiles
from router.text.text_pipeline import TextPipeline

CALL = '<tool_call>\n{"name": "now", "arguments": {"a": 1}}\n</tool_call>'
ANSWER = f"<think>I look at the clock.</think>\nA moment. {CALL}\nSo."
TOOLS = [{"type": "function", "name": "now", "parameters": {"type": "object"}, "strict": False}]
FULL = {
    "tools": TOOLS, "instructions": "Be brief.", "temperature": 0.5, "top_logprobs": 1, "user": "me",
    "metadata": {"a": "b"}, "reasoning": {"effort": "low"}, "parallel_tool_calls": False,
    "text": {"format": {"type": "text"}},
}  # fmt: skip
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


@pytest.fixture
def response_store() -> str:
    return "memory"


@pytest.fixture(scope="module")
def files(files: ModelFiles) -> ModelFiles:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{# </think> <tool_call> #}"
    return replace(files, chat_template=template)


@pytest.fixture(scope="module")
def text(files: ModelFiles) -> Iterator[TextPipeline]:
    pipeline = TextPipeline.from_files(files, threads=2)
    yield pipeline
    pipeline.close()


def events_in(text: str) -> list[Any]:
    blocks = [block for block in text.split("\n\n") if block and not block.startswith(":")]
    return [json.loads(block.partition("data: ")[2]) for block in blocks]


def check_events(events: list[Any]) -> Any:
    """The response of the last event. Each item has one id, place and content in all events and in that response."""
    for event in events:
        assert EVENT.validate_python(event).type == event["type"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    final = events[-1]["response"]
    added = [event for event in events if event["type"] == "response.output_item.added"]
    done = [event for event in events if event["type"] == "response.output_item.done"]
    assert [event["output_index"] for event in added] == list(range(len(added)))
    if final["status"] in ("completed", "incomplete"):
        assert [event["item"] for event in done] == final["output"]
    for event in events:
        assert event.get("response", final)["id"] == final["id"]
        if "output_index" in event:
            item = added[event["output_index"]]["item"]
            assert event.get("item_id", item["id"]) == item["id"] == event.get("item", item)["id"]
    return final


@pytest.mark.slow_cases("900-False")
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("max_output_tokens", [900, 15, 60, 90])
async def test_a_stream(start: Any, tools: Any, background: bool, max_output_tokens: int) -> None:
    running = await start(tools.Engine(text=ANSWER, eos_after=len(ANSWER), per_event=3))
    fields = {"input": "the time?", "stream": True, "background": background, "max_output_tokens": max_output_tokens}
    reply = await running.http.post("/v1/responses", json=fields | FULL)
    final = check_events(events_in(reply.text))
    Response.model_validate(final)
    if max_output_tokens == 900:
        assert [item["type"] for item in final["output"]] == ["reasoning", "message", "function_call", "message"]
        assert [item["id"].split("_")[0] for item in final["output"]] == ["rs", "msg", "fc", "msg"]
        assert final["output"][2]["call_id"].startswith("call_") and final["id"].startswith("resp_")
    assert final["status"] == ("completed" if max_output_tokens == 900 else "incomplete")
    assert (await running.http.get(f"/v1/responses/{final['id']}")).json() == final


async def test_failures_and_cancellations(start: Any, tools: Any) -> None:
    running = await start(tools.Engine(error=InternalError("broken"), error_after=3))
    for background in (False, True):
        fields = {"input": "x", "stream": True, "background": background}
        final = check_events(events_in((await running.http.post("/v1/responses", json=fields)).text))
        assert Response.model_validate(final).status == "failed"
    held = await start(tools.Engine(hold_after=2))
    made = (await held.http.post("/v1/responses", json={"input": "x", "background": True})).json()
    assert Response.model_validate(made).status == "queued"
    ended = (await held.http.post(f"/v1/responses/{made['id']}/cancel")).json()
    assert Response.model_validate(ended).status == "cancelled"


async def test_lists(start: Any, tools: Any) -> None:
    running = await start(tools.Engine(text=ANSWER, eos_after=len(ANSWER)))
    given = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "c"}]},
        {"type": "function_call", "call_id": "c1", "name": "now", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "noon"}]},
        {"role": "user", "content": [{"type": "input_text", "text": "d"}]},
    ]
    made = (await running.http.post("/v1/responses", json={"input": given, **FULL})).json()
    Response.model_validate(made)
    following = {"input": "e", "previous_response_id": made["id"]} | FULL
    made = (await running.http.post("/v1/responses", json=following)).json()
    listed = (await running.http.get(f"/v1/responses/{made['id']}/input_items?limit=100&order=asc")).json()
    found = ResponseItemList.model_validate(listed)
    kinds = ["message", "message", "reasoning", "function_call", "function_call_output", "message"]
    assert [item.type for item in found.data] == [*kinds, "reasoning", "message", "function_call", "message", "message"]
