"""OpenAI's official client, its Responses API and a real model."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel

pytestmark = pytest.mark.e2e

MODEL = "smollm2-135m"


class Weather(BaseModel):
    city: Literal["Paris", "Rome"]
    degrees: Literal[10, 20, 30]


def client_of(system: Any, closing: ExitStack) -> openai.OpenAI:
    return closing.enter_context(openai.OpenAI(base_url=f"{system.stack.url}/v1", api_key="none", max_retries=0))


def test_the_clients_own_parser_gets_what_it_asks_for(system_of: Any, closing: ExitStack) -> None:
    client = client_of(system_of(model=MODEL), closing)
    asked: Any = {"model": MODEL, "input": "The weather in Paris?", "temperature": 0, "max_output_tokens": 60}
    parsed = client.responses.parse(text_format=Weather, **asked)
    assert parsed.status == "completed" and isinstance(parsed.output_parsed, Weather)
    with client.responses.stream(text_format=Weather, **asked) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_parsed == parsed.output_parsed


def test_a_conversation_with_a_tool(system_of: Any, closing: ExitStack) -> None:
    client = client_of(system_of(model=MODEL), closing)
    tool: Any = openai.pydantic_function_tool(Weather, name="get_weather")
    function = tool["function"]
    tools: Any = [{"type": "function", "name": "get_weather", "parameters": function["parameters"], "strict": True}]
    items: Any = [{"role": "user", "content": "The weather in Rome?"}]
    asked: Any = {"model": MODEL, "temperature": 0, "max_output_tokens": 60, "tools": tools}
    called = client.responses.create(input=items, tool_choice={"type": "function", "name": "get_weather"}, **asked)
    (call,) = called.output
    assert call.type == "function_call" and Weather.model_validate_json(call.arguments)
    items += [call.model_dump(), {"type": "function_call_output", "call_id": call.call_id, "output": "21 degrees"}]
    answer = client.responses.create(input=items, tool_choice="none", **asked)
    assert answer.output_text


def test_the_answer_is_that_of_the_other_api(system_of: Any, closing: ExitStack) -> None:
    system = system_of(model=MODEL)
    text = "Name three colours."
    response = client_of(system, closing).responses.create(model=MODEL, input=text, temperature=0, max_output_tokens=24)
    body = {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 24}
    reply = httpx.post(f"{system.stack.url}/v1/chat/completions", json=body, timeout=120, trust_env=False)
    assert response.output_text == reply.json()["choices"][0]["message"]["content"] != ""
