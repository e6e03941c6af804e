"""A real model behind both pools: its tokens are those of transformers, and official clients have it call functions.

One system serves all of these tests: it takes more time to start than to answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import httpx
import openai
import pytest
from pydantic import BaseModel

from common.model_files.resolve import resolve_model
from common.model_files.tokenizer import Tokenizer

from ..rig import System
from .conftest import prompts_of

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

MODEL = "smollm2-135m"
GREEDY = {"temperature": 0}  # newer versions of Anthropic's client have no such argument
PROMPTS = prompts_of((5, 40), vocab_size=49_000, seed=8)
GREEDY_TOKENS = [[288, 260, 3925, 506, 768, 15725, 5106, 30], [102, 198, 198, 1780, 314, 260, 768, 2378]]
"""What transformers generates for PROMPTS."""


class Weather(BaseModel):
    city: Literal["Paris", "Rome"]
    degrees: Literal[10, 20, 30]


@pytest.fixture
def system(system_of: Any) -> System:
    found: System = system_of(
        model=MODEL, router_flags=("--local-prefill-threshold", "0"), worker_flags=("--kv-memory-gib", "0.5")
    )
    return found


@pytest.fixture
def sdk(system: System) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{system.stack.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def claude(system: System) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=system.stack.url, api_key="none", max_retries=0) as client:
        yield client


def test_the_tokens_are_those_of_transformers(system: System) -> None:
    assert system.generate(PROMPTS, max_tokens=len(GREEDY_TOKENS[0])) == GREEDY_TOKENS


def test_transformers_gives_the_tokens_that_are_written_down(real_oracle: Any) -> None:
    assert [real_oracle(MODEL).greedy(prompt, len(GREEDY_TOKENS[0])) for prompt in PROMPTS] == GREEDY_TOKENS


# ---------------------------------------------------------------- OpenAI's chat completions

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["C", "F"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
ASK: Any = [{"role": "user", "content": "What is the weather in Paris? Use the function."}]


def test_the_sdk_calls_a_function_and_hands_back_its_result(sdk: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "tools": [TOOL], "temperature": 0, "max_tokens": 120}
    answer = sdk.chat.completions.create(messages=ASK, tool_choice="required", parallel_tool_calls=False, **asked)
    assert answer.choices[0].finish_reason == "tool_calls" and answer.choices[0].message.content is None
    (call,) = answer.choices[0].message.tool_calls or ()
    assert call.type == "function" and call.function.name == "get_weather"
    assert json.loads(call.function.arguments).keys() <= {"city", "unit"}
    streamed = ""
    for chunk in sdk.chat.completions.create(
        messages=ASK, tool_choice="required", parallel_tool_calls=False, stream=True, **asked
    ):
        for part in chunk.choices[0].delta.tool_calls or ():
            streamed += (part.function and part.function.arguments) or ""
    assert streamed == call.function.arguments
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "18 °C and sunny"}
    said = answer.choices[0].message.model_dump(exclude_none=True)
    after = sdk.chat.completions.create(messages=[*ASK, said, result], **{**asked, "max_tokens": 30})
    assert after.choices[0].message.content or after.choices[0].message.tool_calls


def test_arguments_have_no_members_that_are_not_named(sdk: openai.OpenAI) -> None:
    """A small model invents some where it may, at this temperature in most answers."""
    tool: Any = json.loads(json.dumps(TOOL))
    del tool["function"]["parameters"]["additionalProperties"]
    asked: Any = {
        "model": MODEL,
        "messages": ASK,
        "tools": [tool],
        "tool_choice": "required",
        "max_tokens": 60,
    }
    answer = sdk.chat.completions.create(n=8, temperature=1.3, seed=1, parallel_tool_calls=False, **asked)
    called = [call for choice in answer.choices for call in choice.message.tool_calls or ()]
    assert len(called) == 8 and {choice.finish_reason for choice in answer.choices} == {"tool_calls"}
    for call in called:
        assert call.type == "function" and json.loads(call.function.arguments).keys() <= {"city", "unit"}


def test_a_call_is_streamed_part_by_part_and_cut_off_anywhere(sdk: openai.OpenAI) -> None:
    """With the tokens of a real model, of which several make up a mark."""
    asked: Any = {"model": MODEL, "messages": ASK, "tools": [TOOL], "temperature": 0, "stream": True}
    for num_tokens in range(1, 36):
        required = "required" if num_tokens % 2 else "auto"
        chunks = sdk.chat.completions.create(max_tokens=num_tokens, tool_choice=required, **asked)
        _, *choices = [chunk.choices[0] for chunk in chunks]
        for choice in choices:
            assert choice.finish_reason or choice.delta.content or choice.delta.tool_calls
            assert len(choice.delta.tool_calls or ()) <= 1
            assert not (choice.delta.content and (required == "required" or "<tool" in choice.delta.content))
        assert choices[-1].finish_reason in ("length", "tool_calls")


def test_the_sdk_parses_an_answer_of_a_schema(sdk: openai.OpenAI) -> None:
    wanted = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
              "required": ["name", "age"], "additionalProperties": False}  # fmt: skip
    answer = sdk.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Bob is 42 years old. Give his name and age as JSON."}],
        response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": wanted, "strict": True}},
        temperature=0,
    )
    assert json.loads(answer.choices[0].message.content or "") == {"name": "Bob", "age": 42}
    text = answer.choices[0].message.content or ""
    assert len(Tokenizer.from_file(resolve_model(MODEL).tokenizer).encode(text)) < 60, "it wanders"


# ---------------------------------------------------------------- OpenAI's responses


def test_the_clients_own_parser_gets_what_it_asks_for(sdk: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "input": "The weather in Paris?", "temperature": 0, "max_output_tokens": 60}
    parsed = sdk.responses.parse(text_format=Weather, **asked)
    assert parsed.status == "completed" and isinstance(parsed.output_parsed, Weather)
    with sdk.responses.stream(text_format=Weather, **asked) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_parsed == parsed.output_parsed


def test_responses_with_a_tool(sdk: openai.OpenAI) -> None:
    tool: Any = openai.pydantic_function_tool(Weather, name="get_weather")
    function = tool["function"]
    tools: Any = [{"type": "function", "name": "get_weather", "parameters": function["parameters"], "strict": True}]
    items: Any = [{"role": "user", "content": "The weather in Rome?"}]
    asked: Any = {"model": MODEL, "temperature": 0, "max_output_tokens": 60, "tools": tools}
    called = sdk.responses.create(input=items, tool_choice={"type": "function", "name": "get_weather"}, **asked)
    (call,) = called.output
    assert call.type == "function_call" and Weather.model_validate_json(call.arguments)
    items += [call.model_dump(), {"type": "function_call_output", "call_id": call.call_id, "output": "21 degrees"}]
    answer = sdk.responses.create(input=items, tool_choice="none", **asked)
    assert answer.output_text


def test_responses_are_those_of_the_other_api(system: System, sdk: openai.OpenAI) -> None:
    text = "Name three colours."
    response = sdk.responses.create(model=MODEL, input=text, temperature=0, max_output_tokens=24)
    body = {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 24}
    reply = httpx.post(f"{system.stack.url}/v1/chat/completions", json=body, timeout=120, trust_env=False)
    assert response.output_text == reply.json()["choices"][0]["message"]["content"] != ""


# ---------------------------------------------------------------- Anthropic's messages

CITY = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}


def test_messages_with_a_tool(claude: anthropic.Anthropic) -> None:
    asked: Any = {
        "model": MODEL,
        "max_tokens": 60,
        "extra_body": GREEDY,
        "system": "You are a helpful assistant.",
    }
    turns: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
    tools: Any = [{"name": "get_weather", "description": "The weather of a city", "input_schema": CITY}]
    chosen: Any = {"type": "tool", "name": "get_weather"}
    whole = claude.messages.create(messages=turns, tools=tools, tool_choice=chosen, **asked)
    with claude.messages.stream(messages=turns, tools=tools, tool_choice=chosen, **asked) as stream:
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        (call,) = message.content
        assert call.type == "tool_use" and message.stop_reason == "tool_use"
        assert call.input in ({"city": "Paris"}, {"city": "Rome"})
    assert whole.content[0].input == streamed.content[0].input  # type: ignore[union-attr]
    result: Any = {"type": "tool_result", "tool_use_id": whole.content[0].id, "content": "21 degrees, sunny"}  # type: ignore[union-attr]
    turns += [{"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
    answer = claude.messages.create(messages=turns, tools=tools, **asked)
    assert answer.content and answer.usage.output_tokens > 0


def test_messages_are_those_of_the_other_api(system: System, claude: anthropic.Anthropic) -> None:
    turns: Any = [{"role": "user", "content": "Name three colours."}]
    asked: Any = {"model": MODEL, "max_tokens": 24}
    message = claude.messages.create(messages=turns, extra_body=GREEDY, **asked)
    with claude.messages.stream(messages=turns, extra_body=GREEDY, **asked) as stream:
        streamed = "".join(stream.text_stream)
    reply = httpx.post(
        f"{system.stack.url}/v1/chat/completions",
        json={"messages": turns, **asked, **GREEDY},
        timeout=120,
        trust_env=False,
    )
    text = reply.json()["choices"][0]["message"]["content"]
    assert message.content[0].text == streamed == text and text  # type: ignore[union-attr]
