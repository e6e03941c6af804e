"""Anthropic's official client and a real model."""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import Any

import anthropic
import httpx
import pytest
from anthropic import beta_tool

pytestmark = pytest.mark.e2e

GREEDY = {"temperature": 0}  # newer versions of the client have no such argument
CITY = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
ONLY_CITY = CITY | {"additionalProperties": False}


def test_a_conversation_with_a_tool(system_of: Any, closing: ExitStack) -> None:
    system = system_of(model="smollm2-135m")
    client = closing.enter_context(anthropic.Anthropic(base_url=system.stack.url, api_key="none", max_retries=0))
    asked: Any = {
        "model": "smollm2-135m",
        "max_tokens": 60,
        "extra_body": GREEDY,
        "system": "You are a helpful assistant.",
    }
    turns: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
    tools: Any = [{"name": "get_weather", "description": "The weather of a city", "input_schema": CITY}]
    chosen: Any = {"type": "tool", "name": "get_weather"}
    whole = client.messages.create(messages=turns, tools=tools, tool_choice=chosen, **asked)
    with client.messages.stream(messages=turns, tools=tools, tool_choice=chosen, **asked) as stream:
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        (call,) = message.content
        assert call.type == "tool_use" and message.stop_reason == "tool_use"
        assert call.input in ({"city": "Paris"}, {"city": "Rome"})
    assert whole.content[0].input == streamed.content[0].input  # type: ignore[union-attr]
    result: Any = {"type": "tool_result", "tool_use_id": whole.content[0].id, "content": "21 degrees, sunny"}  # type: ignore[union-attr]
    turns += [{"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
    answer = client.messages.create(messages=turns, tools=tools, **asked)
    assert answer.content and answer.usage.output_tokens > 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_runner_sends_the_whole_conversation(system_of: Any, closing: ExitStack, stream: bool) -> None:
    client = closing.enter_context(anthropic.Anthropic(base_url=system_of().stack.url, api_key="none", max_retries=0))
    asked: list[str] = []

    @beta_tool(input_schema=ONLY_CITY)
    def get_weather(city: str) -> str:
        """The weather of a city."""
        asked.append(city)
        return "21 degrees, sunny"

    turns: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
    chosen: Any = {"type": "tool", "name": "get_weather"}
    runner: Any = client.beta.messages.tool_runner(
        model="tiny-random", max_tokens=300, messages=turns, tools=[get_weather], tool_choice=chosen, max_iterations=3,
        stream=stream, extra_body=GREEDY,
    )  # fmt: skip
    messages = [item.get_final_message() if stream else item for item in runner]
    assert [message.stop_reason for message in messages] == ["tool_use"] * 3
    assert len(asked) == 3 and set(asked) <= {"Paris", "Rome"}
    lengths = [message.usage.input_tokens + message.usage.cache_read_input_tokens for message in messages]
    assert lengths == sorted(set(lengths)), "each turn has the call and the result of the turn before"


def test_an_answer_in_a_form(system_of: Any, closing: ExitStack) -> None:
    client = closing.enter_context(anthropic.Anthropic(base_url=system_of().stack.url, api_key="none", max_retries=0))
    form: Any = {"format": {"type": "json_schema", "schema": ONLY_CITY}}
    turns: Any = [{"role": "user", "content": "Where?"}]
    message = client.messages.create(model="tiny-random", max_tokens=99, messages=turns, output_config=form)
    assert json.loads(message.content[0].text) in ({"city": "Paris"}, {"city": "Rome"})  # type: ignore[union-attr]


def test_the_answer_is_that_of_the_other_api(system_of: Any, closing: ExitStack) -> None:
    system = system_of(model="smollm2-135m")
    client = closing.enter_context(anthropic.Anthropic(base_url=system.stack.url, api_key="none", max_retries=0))
    turns: Any = [{"role": "user", "content": "Name three colours."}]
    asked: Any = {"model": "smollm2-135m", "max_tokens": 24}
    message = client.messages.create(messages=turns, extra_body=GREEDY, **asked)
    with client.messages.stream(messages=turns, extra_body=GREEDY, **asked) as stream:
        streamed = "".join(stream.text_stream)
    reply = httpx.post(
        f"{system.stack.url}/v1/chat/completions",
        json={"messages": turns, **asked, **GREEDY},
        timeout=120,
        trust_env=False,
    )
    text = reply.json()["choices"][0]["message"]["content"]
    assert message.content[0].text == streamed == text and text  # type: ignore[union-attr]
