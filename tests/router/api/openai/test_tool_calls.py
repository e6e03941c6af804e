"""Answers that call functions, in OpenAI's shapes, streamed and not."""

from __future__ import annotations

import json
from typing import Any

import pytest

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("now", "get_weather")]
ARGUMENTS = '{"city": "Paris", "days": [1, 2]}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


async def chat_of(start: Any, made: Any, text: str, **fields: Any) -> dict[str, Any]:
    running = await start(made.Engine(text=text, eos_after=len(text.encode()), per_event=3))
    reply = await running.chat(**{"tools": TOOLS, **fields})
    assert reply.status_code == 200, reply.text
    choice: dict[str, Any] = reply.json()["choices"][0]
    return choice


async def test_calls(start: Any, tools: Any) -> None:
    choice = await chat_of(start, tools, f"{CALL}\n{OTHER}")
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["content"] is None and message["role"] == "assistant"
    called = [(call["type"], call["function"]) for call in message["tool_calls"]]
    assert called == [
        ("function", {"name": "get_weather", "arguments": ARGUMENTS}),
        ("function", {"name": "now", "arguments": "{}"}),
    ]
    ids = [call["id"] for call in message["tool_calls"]]
    assert len(set(ids)) == 2 and all(name.startswith("call_") for name in ids)


async def test_text_before_a_call_is_content(start: Any, tools: Any) -> None:
    message = (await chat_of(start, tools, f"I look. {CALL}"))["message"]
    assert message["content"] == "I look. " and len(message["tool_calls"]) == 1


async def test_an_answer_without_calls_is_as_ever(start: Any, tools: Any) -> None:
    choice = await chat_of(start, tools, "Hello <tool_")
    assert choice["finish_reason"] == "stop"
    assert choice["message"] == {"role": "assistant", "content": "Hello <tool_", "refusal": None}


async def test_without_tools_such_text_is_text(start: Any, tools: Any) -> None:
    choice = await chat_of(start, tools, CALL, tools=None)
    assert choice["message"]["content"] == CALL and choice["finish_reason"] == "stop"


async def test_a_call_that_is_cut_off_says_so(start: Any, tools: Any) -> None:
    running = await start(tools.Engine(text=CALL))
    num_tokens = CALL.index('"Paris"')
    choice = (await running.chat(tools=TOOLS, max_tokens=num_tokens)).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"city": '}


@pytest.mark.parametrize("per_event", [1, 5, 1000])
async def test_calls_are_streamed(start: Any, tools: Any, per_event: int) -> None:
    text = f"Well. {CALL}\n{OTHER}"
    running = await start(tools.Engine(text=text, eos_after=len(text), per_event=per_event))
    *events, done = await running.events("chat", tools=TOOLS)
    assert done == "[DONE]"
    choices = [event["choices"][0] for event in events]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == "Well. "
    parts = [part for choice in choices for part in choice["delta"].get("tool_calls", [])]
    for index, (name, arguments) in enumerate([("get_weather", ARGUMENTS), ("now", "{}")]):
        first, *rest = [part for part in parts if part["index"] == index]
        assert first["function"]["name"] == name and first["type"] == "function" and first["id"]
        assert all(part.keys() == {"index", "function"} and part["function"].keys() == {"arguments"} for part in rest)
        assert "".join(part["function"]["arguments"] for part in (first, *rest)) == arguments
        json.loads(arguments)
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["tool_calls"]
    assert "<tool_call>" not in json.dumps(events)


async def test_every_choice_has_calls_of_its_own(start: Any, tools: Any) -> None:
    running = await start(tools.Engine(text=OTHER, eos_after=len(OTHER)))
    choices = (await running.chat(tools=TOOLS, n=3)).json()["choices"]
    ids = {choice["message"]["tool_calls"][0]["id"] for choice in choices}
    assert len(ids) == 3


async def test_ids_of_calls_are_short_enough_for_openai(start: Any, tools: Any) -> None:
    """OpenAI accepts at most 40 characters when a client sends a call back."""
    call = (await chat_of(start, tools, CALL))["message"]["tool_calls"][0]["id"]
    assert call.endswith("_0_0") and len(f"{call.removesuffix('_0_0')}_127_999") <= 40


async def test_the_prompt_describes_the_functions(running: Any, text: Any) -> None:
    named = {"type": "function", "function": {"name": "now"}}
    for choice, told in (("auto", ("now", "get_weather")), (named, ("now",)), ("none", ())):
        await running.chat(tools=TOOLS, tool_choice=choice, max_tokens=1)
        shown = text.tokenizer.decode(running.engine.requests[-1].prompt_token_ids, skip_special_tokens=False)
        assert [name for name in ("now", "get_weather") if f'"{name}"' in shown] == list(told)


async def test_results_of_calls_are_part_of_the_conversation(running: Any, text: Any) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "Time?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "noon"},
    ]
    assert (await running.chat(messages=messages, tools=TOOLS, max_tokens=1)).status_code == 200
    shown = text.tokenizer.decode(running.engine.requests[-1].prompt_token_ids, skip_special_tokens=False)
    assert OTHER in shown and "<tool_response>\nnoon\n</tool_response>" in shown
