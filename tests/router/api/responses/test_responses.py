"""OpenAI's Responses API, by its official client and by hand."""

from __future__ import annotations

import json
import re
from typing import Any

import openai
import pytest

from common.errors import InternalError
from router.api.responses.fields import ResponsesRequest
from router.request.fields import MAX_MESSAGES, MAX_TOOLS

from ...sdk import client_of

ARGUMENTS = '{"city": "Paris", "days": [1, 2]}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
TOOLS: Any = [
    {"type": "function", "name": "get_weather", "parameters": {"type": "object"}, "strict": False},
    {"type": "function", "name": "now", "description": "the time", "parameters": None, "strict": None},
]


async def post(running: Any, **fields: Any) -> Any:
    return await running.http.post("/v1/responses", json={"input": "hi", "max_output_tokens": 9, **fields})


async def events_of(running: Any, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream; the name of each is also in its data."""
    reply = await post(running, stream=True, **fields)
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = []
    for event in filter(None, reply.text.split("\n\n")):
        name, data = event.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def chat_of(**fields: Any) -> list[dict[str, Any]]:
    """The chat messages that a request means."""
    request = ResponsesRequest.model_validate({"max_output_tokens": 1, **fields}, strict=True)
    return [message.as_dict() for message in request.as_chat().messages]


async def test_a_response(sdk: openai.AsyncOpenAI) -> None:
    response = await sdk.responses.create(model="tiny-random", input="hi", max_output_tokens=9, metadata={"a": "b"})
    assert response.output_text == "The quick"
    assert response.status == "incomplete" and response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage is not None and response.usage.output_tokens == 9
    assert response.usage.total_tokens == response.usage.input_tokens + 9
    assert response.id.startswith("resp") and response.metadata == {"a": "b"} and response.error is None


async def test_an_end_by_itself(start: Any, tools: Any) -> None:
    running = await start(tools.Engine(eos_after=5, cached=2))
    response = (await post(running)).json()
    assert (response["status"], response["incomplete_details"]) == ("completed", None)
    (message,) = response["output"]
    assert (message["type"], message["role"], message["status"]) == ("message", "assistant", "completed")
    assert message["content"] == [{"type": "output_text", "text": "The q", "annotations": [], "logprobs": []}]
    assert response["usage"]["input_tokens_details"] == {"cached_tokens": 2, "cache_write_tokens": 0}


async def test_a_stream_by_the_official_client(start: Any, tools: Any) -> None:
    running = await start(tools.Engine(eos_after=9))
    async with client_of(running) as sdk, sdk.responses.stream(model="tiny-random", input="hi") as stream:
        deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
        final = await stream.get_final_response()
    assert len(deltas) > 1 and "".join(deltas) == final.output_text == "The quick"
    assert final.usage is not None and final.usage.output_tokens == 10


async def test_the_events_of_a_stream(running: Any) -> None:
    events = await events_of(running, max_output_tokens=2)
    kinds = [event["type"].removeprefix("response.") for event in events]
    deltas = ["output_text.delta"] * kinds.count("output_text.delta")
    assert kinds == [
        "created", "in_progress", "output_item.added", "content_part.added", *deltas,
        "output_text.done", "content_part.done", "output_item.done", "incomplete",
    ]  # fmt: skip
    whole = (await post(running, max_output_tokens=2)).json()
    streamed = events[-1]["response"]
    for response in (whole, streamed):
        response["output"][0].pop("id")
        for name in ("id", "created_at"):
            response.pop(name)
    assert streamed == whole


async def test_an_answer_without_text_is_an_empty_message(start: Any, tools: Any) -> None:
    running = await start(tools.Engine(eos_after=0))
    assert (await post(running)).json()["output"][0]["content"][0]["text"] == ""
    assert (await events_of(running))[-1]["response"]["output"][0]["content"][0]["text"] == ""


async def test_calls(start: Any, tools: Any) -> None:
    text = f"I look. {CALL}\n{OTHER}"
    running = await start(tools.Engine(text=text, eos_after=len(text.encode()), per_event=3))
    asked: Any = {"model": "tiny-random", "input": "hi", "tools": TOOLS, "max_output_tokens": 900}
    async with client_of(running) as sdk:
        whole = await sdk.responses.create(**asked)
        async with sdk.responses.stream(**asked) as stream:
            done = [event async for event in stream if event.type == "response.function_call_arguments.done"]
            streamed = await stream.get_final_response()
    for response in (whole, streamed):
        assert response.status == "completed" and response.output_text == "I look. "
        said, first, second = response.output
        assert (said.type, first.type, second.type) == ("message", "function_call", "function_call")
        assert (first.name, json.loads(first.arguments)) == ("get_weather", json.loads(ARGUMENTS))  # type: ignore[union-attr]
        assert (second.name, second.arguments) == ("now", "{}")  # type: ignore[union-attr]
        assert first.call_id != second.call_id  # type: ignore[union-attr]
    assert [event.arguments for event in done] == [ARGUMENTS, "{}"]


async def test_a_call_that_is_cut_off_is_incomplete(start: Any, tools: Any) -> None:
    running = await start(tools.Engine(text=CALL))
    response = (await post(running, tools=TOOLS, max_output_tokens=CALL.index('"Paris"'))).json()
    (call,) = response["output"]
    assert (response["status"], call["status"], call["arguments"]) == ("incomplete", "incomplete", '{"city": ')


async def test_only_what_was_cut_off_is_incomplete(start: Any, tools: Any) -> None:
    text = f"I look. {OTHER}\n{CALL}"
    running = await start(tools.Engine(text=text, per_event=1000))
    fields = {"tools": TOOLS, "max_output_tokens": text.index('"Paris"')}
    for response in ((await post(running, **fields)).json(), (await events_of(running, **fields))[-1]["response"]):
        assert [item["status"] for item in response["output"]] == ["completed", "completed", "incomplete"]


def group(name: str, *tools: Any) -> dict[str, Any]:
    return {"type": "namespace", "name": name, "description": "a group", "tools": [*tools]}


@pytest.mark.parametrize("response_store", ["memory"])
async def test_a_namespace_is_a_group_of_functions(start: Any, tools: Any) -> None:
    """A call names the namespace of its function, and comes back with it."""
    running = await start(tools.Engine(text=OTHER, eos_after=len(OTHER)))
    asked: Any = {"model": "tiny-random", "input": "hi", "tools": [group("clock", TOOLS[1]), TOOLS[0]]}
    async with client_of(running) as sdk:
        whole = await sdk.responses.create(**asked)
        async with sdk.responses.stream(**asked) as stream:
            streamed = await stream.get_final_response()
        for response in (whole, streamed):
            (call,) = response.output
            assert call.type == "function_call" and (call.namespace, call.name, call.arguments) == (
                "clock",
                "now",
                "{}",
            )
        assert [(tool.type, tool.name) for tool in whole.tools] == [("namespace", "clock"), ("function", "get_weather")]  # type: ignore[union-attr]
        came: Any = [{"type": "function_call_output", "call_id": whole.output[0].call_id, "output": "noon"}]  # type: ignore[union-attr]
        told = await sdk.responses.create(**asked | {"input": came, "previous_response_id": whole.id})
        items = [item async for item in sdk.responses.input_items.list(told.id, order="asc")]
        assert items[1].namespace == "clock"  # type: ignore[union-attr]


@pytest.mark.parametrize(("called", "namespace"), [("left__now", "left"), ("right__now", "right"), ("only", "right")])
async def test_functions_of_one_name_in_two_namespaces(start: Any, tools: Any, called: str, namespace: str) -> None:
    text = f'<tool_call>\n{{"name": "{called}", "arguments": {{}}}}\n</tool_call>'
    running = await start(tools.Engine(text=text, eos_after=len(text)))
    groups = [group("left", TOOLS[1]), group("right", TOOLS[1], TOOLS[1] | {"name": "only"})]
    (call,) = (await post(running, tools=groups, max_output_tokens=900)).json()["output"]
    assert (call["namespace"], call["name"]) == (namespace, called.removeprefix(f"{namespace}__"))
    request = ResponsesRequest.model_validate({"input": [call], "tools": groups})
    assert request.as_chat().messages[0].as_dict()["tool_calls"][0]["function"]["name"] == called


async def test_a_name_that_is_too_long_with_its_namespace_is_refused(running: Any) -> None:
    groups = [group("a" * 40, TOOLS[1] | {"name": "b" * 40}), TOOLS[1] | {"name": "b" * 40}]
    reply = await post(running, tools=groups)
    assert reply.status_code == 400 and "82 characters" in reply.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_tools_that_openai_runs_are_left_out_and_named(running: Any, caplog: Any, stream: bool) -> None:
    caplog.set_level("INFO", logger="router.generation.request_log")
    hosted = [{"type": "web_search", "external_web_access": False}, {"type": "mcp", "server_label": "x"}]
    reply = await post(running, tools=[*hosted, *TOOLS], stream=stream)
    assert reply.headers["x-diptych-tools-left-out"] == "web_search, mcp"
    assert caplog.records[-1].tools_left_out == "web_search,mcp"
    shown = json.loads(reply.text.split("data: ")[-1])["response"] if stream else reply.json()
    assert [tool["name"] for tool in shown["tools"]] == ["get_weather", "now"]
    plain = await post(running, tools=TOOLS)
    assert "x-diptych-tools-left-out" not in plain.headers
    assert running.engine.requests[0].prompt_token_ids == running.engine.requests[1].prompt_token_ids


async def test_log_probabilities(running: Any) -> None:
    for fields in ({"include": ["message.output_text.logprobs"], "top_logprobs": 1}, {"top_logprobs": 1}):
        whole = (await post(running, max_output_tokens=2, **fields)).json()["output"][0]["content"][0]["logprobs"]
        assert [(token["token"], token["logprob"]) for token in whole] == [("T", -0.5), ("h", -0.5)]
        assert whole[0]["top_logprobs"] == [{"token": "a", "logprob": -1.0, "bytes": [97]}]
        events = await events_of(running, max_output_tokens=2, **fields)
        deltas = [event for event in events if event["type"] == "response.output_text.delta"]
        assert [token for event in deltas for token in event["logprobs"]] == whole


@pytest.mark.parametrize("response_store", ["memory"])
async def test_fields_reach_the_workers_and_come_back(running: Any) -> None:
    fields = {
        "temperature": 0.5, "top_p": 0.9, "max_output_tokens": 20, "instructions": "Be brief.", "store": True,
        "user": "me", "tools": TOOLS, "tool_choice": "none", "parallel_tool_calls": False, "truncation": "disabled",
        "reasoning": {"effort": "low"}, "include": ["reasoning.encrypted_content"],
    }  # fmt: skip
    response = (await post(running, **fields)).json()
    params = running.engine.requests[0].params
    assert (params.temperature, params.top_p, params.max_tokens) == (0.5, 0.9, 20)
    same = ("temperature", "top_p", "max_output_tokens", "instructions", "user", "tool_choice", "parallel_tool_calls")
    assert {name: response[name] for name in same} == {name: fields[name] for name in same}
    assert response["store"] is True and [tool["name"] for tool in response["tools"]] == ["get_weather", "now"]


@pytest.mark.slow
async def test_its_prompt_is_that_of_the_same_conversation(running: Any) -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "c"}]},
        {"role": "user", "content": "hi"},
    ]
    await post(running, input=items, instructions="s")
    same = [("system", "s"), ("user", "a\nb"), ("assistant", "c"), ("user", "hi")]
    await running.chat(messages=[{"role": role, "content": content} for role, content in same])
    first, second = running.engine.requests
    assert first.prompt_token_ids == second.prompt_token_ids


def test_calls_and_their_outputs_become_messages() -> None:
    items = [
        {"role": "user", "content": "weather?"},
        {"type": "reasoning", "id": "r", "summary": []},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": '{"city":"Paris"}'},
        {"type": "function_call", "call_id": "c2", "name": "now", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "21 C"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "noon"}]},
        {"type": "function_call", "call_id": "c3", "name": "now", "arguments": "{}"},
    ]
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city":"Paris"}'}},
        {"id": "c2", "type": "function", "function": {"name": "now", "arguments": "{}"}},
    ]
    again = {"id": "c3", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    assert chat_of(input=items, instructions="Be brief.") == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "I look.", "tool_calls": calls},
        {"role": "tool", "content": "21 C", "tool_call_id": "c1"},
        {"role": "tool", "content": "noon", "tool_call_id": "c2"},
        {"role": "assistant", "content": None, "tool_calls": [again]},
    ]


@pytest.mark.parametrize("said", ["", "x"])
def test_what_the_assistant_said_twice_stays_two_messages(said: str) -> None:
    items = [
        {"role": "assistant", "content": said},
        {"role": "assistant", "content": "y"},
        {"role": "user", "content": "z"},
    ]
    assert [message["content"] for message in chat_of(input=items)] == [said, "y", "z"]


def test_the_form_of_the_text() -> None:
    wanted = {"type": "json_schema", "name": "thing", "schema": {"type": "object"}, "strict": True}
    chat = ResponsesRequest.model_validate({"input": "hi", "text": {"format": wanted}}).as_chat()
    assert chat.response_format is not None and chat.response_format.json_schema is not None
    assert chat.response_format.json_schema.json_schema == {"type": "object"}
    for kind in ("text", "json_object"):
        plain = ResponsesRequest.model_validate({"input": "hi", "text": {"format": {"type": kind}}}).as_chat()
        assert plain.response_format is not None and plain.response_format.type == kind


async def test_the_form_comes_back(running: Any) -> None:
    wanted = {"type": "json_schema", "name": "thing", "schema": {"type": "object"}, "strict": True}
    shown = (await post(running, text={"format": wanted})).json()["text"]["format"]
    assert wanted.items() <= shown.items()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user"}]}, r"input\[0\]: a message must have"),
        ({"input": [{"role": "tool", "content": "x"}]}, r"input\[0\].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, r"content\[0\].type: 'input_image'"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, r"content\[0\].text: is required"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, r"input\[0\].type: 'item_reference'"),
        ({"input": [{"type": "function_call", "name": "now"}]}, "a call must have a call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "must have a call_id and an output"),
        ({"previous_response_id": 1}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"background": True, "store": False}, "store"),
        ({"truncation": "auto"}, "truncation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 10**6}, "1000000"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "nothing"}}}},
            "response_format|text",
        ),
        ({"tools": [{"type": "custom", "name": "x"}]}, r"tools\[0\].type"),
        ({"tools": [{"type": "namespace", "tools": TOOLS}]}, r"tools\[0\].name"),
        (
            {"tools": [{"type": "namespace", "name": "x", "tools": [{"type": "namespace"}]}]},
            r"tools\[0\].tools\[0\].type",
        ),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "at least one tool"),
        ({"text": {"format": {"type": "text", "schema": {}}}}, "text.format.schema: not allowed with type 'text'"),
        ({"tools": [{"type": "function"}]}, r"tools\[0\].name"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "other"}}, "is not in tools"),
        ({"tool_choice": "required"}, "at least one tool"),
    ],
)
async def test_what_is_wrong_is_said(running: Any, fields: dict[str, Any], said: str) -> None:
    reply = await post(running, **fields)
    assert reply.status_code == 400, reply.text
    assert re.search(said, reply.json()["error"]["message"]), reply.text
    assert running.engine.requests == []


@pytest.mark.parametrize("nothing", ["previous_response_id", "conversation", "prompt", "background"])
async def test_nulls_change_nothing(running: Any, nothing: str) -> None:
    assert (await post(running, **{nothing: None})).status_code == 200


async def test_a_long_conversation_is_translated_apart(running: Any) -> None:
    reply = await post(running, input=[{"role": "user", "content": ""}] * 1500)
    assert reply.status_code == 400 and reply.json()["error"]["code"] == "context_length_exceeded"
    reply = await post(running, input=[{"type": "item_reference", "id": "x"}] * 1500)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "input[0].type"


async def test_too_many_parts_are_not_looked_at(running: Any) -> None:
    output = {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": ""}] * 9000}
    reply = await post(running, input=[output] * 2)
    assert reply.status_code == 400 and "at most 10000 parts" in reply.json()["error"]["message"]


async def test_metadata_of_many_entries_is_not_looked_at(running: Any) -> None:
    """Each wrong entry would be an error of its own."""
    reply = await post(running, metadata=dict.fromkeys(map(str, range(5000)), 1))
    assert reply.status_code == 400
    assert "metadata: must have at most 256 entries, not 5,000" in reply.json()["error"]["message"]


CALLS = [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}] * (MAX_TOOLS + 1)
USES = [{"type": "tool_use", "id": "a", "name": "f", "input": {}}] * (MAX_TOOLS + 1)
TURNS = [{"role": "user", "content": ""}] * MAX_MESSAGES


@pytest.mark.parametrize(
    ("path", "fields", "problem"),
    [
        ("/v1/responses", {"input": CALLS}, "tool_calls: must have at most 1024 entries, not 1025"),
        ("/v1/responses", {"input": TURNS, "instructions": "x"}, "messages: must have at most 10000 entries"),
        ("/v1/messages", {"messages": [{"role": "assistant", "content": USES}]}, "tool_calls: must have at most 1024"),
        ("/v1/messages", {"messages": TURNS, "system": "x"}, "messages: must have at most 10000 entries, not 10001"),
        ("/v1/messages/count_tokens", {"messages": TURNS, "system": "x"}, "messages: must have at most 10000 entries"),
    ],
)
async def test_what_exceeds_a_chat_request_is_refused(
    running: Any, path: str, fields: dict[str, Any], problem: str
) -> None:
    reply = await running.http.post(path, json={"max_tokens": 1} | fields if "messages" in path else fields)
    assert reply.status_code == 400 and problem in reply.json()["error"]["message"], reply.text


async def test_a_stream_that_breaks_says_so(start: Any, tools: Any) -> None:
    running = await start(tools.Engine(error=InternalError("broken"), error_after=3))
    events = await events_of(running)
    assert events[-1]["type"] == "response.failed"
    response = events[-1]["response"]
    assert (response["status"], response["error"]["message"]) == ("failed", "broken")


async def test_errors_are_openais(sdk: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        await sdk.responses.create(model="gpt", input="hi")


async def test_a_long_input_is_taken_and_a_longer_one_refused_with_its_length(running: Any) -> None:
    assert (await post(running, input="x" * 500)).status_code == 200
    reply = await post(running, input="x" * 2_000_000)
    assert reply.status_code == 400 and reply.json()["error"]["code"] == "context_length_exceeded"
