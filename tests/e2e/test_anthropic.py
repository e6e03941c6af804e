"""Anthropic's official client. What it says with a real model is in test_real_model.py."""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import Any

import anthropic
import pytest
from anthropic import beta_tool

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

GREEDY = {"temperature": 0}  # newer versions of the client have no such argument
CITY = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
ONLY_CITY = CITY | {"additionalProperties": False}


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
