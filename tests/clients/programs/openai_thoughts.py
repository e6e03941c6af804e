"""OpenAI's SDK with a model that thinks: chat completions and responses, whole, streamed and parsed."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
from pydantic import BaseModel
from weather import ABOUT, NAME, PARAMETERS, QUESTION, RESULT, place, tell

url, name = place()
FUNCTION: dict[str, Any] = {"name": NAME, "description": ABOUT, "parameters": PARAMETERS}
TOOL: Any = {"type": "function", "function": FUNCTION}
HELLO: Any = [{"role": "user", "content": "Hello"}]
ASKED: list[Any] = [{"role": "user", "content": QUESTION}]


class Weather(BaseModel):
    """The weather in a city."""

    city: Literal["Paris"]
    degrees: Literal[18]


def joined(parts: list[Any], field: str) -> str:
    return "".join(getattr(part.choices[0].delta, field, None) or "" for part in parts if part.choices)


def chats(client: openai.OpenAI, asked: dict[str, Any]) -> dict[str, Any]:
    create = client.chat.completions.create
    said = create(messages=HELLO, reasoning_effort="medium", **asked)
    message: Any = said.choices[0].message
    parts = list(create(messages=HELLO, stream=True, stream_options={"include_usage": True}, **asked))
    parsed = client.chat.completions.parse(messages=HELLO, response_format=Weather, **asked)
    answer: Any = parsed.choices[0].message
    first: Any = create(messages=ASKED, tools=[TOOL], **asked).choices[0].message
    call = first.tool_calls[0]
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": RESULT}
    last: Any = create(messages=[*ASKED, first, result], tools=[TOOL], **asked)
    bare = {"role": "assistant", "tool_calls": [call.model_dump()]}
    forgot = create(messages=[*ASKED, bare, result], tools=[TOOL], **asked)
    return {
        "said": [message.content, message.reasoning_content, message.reasoning, thought_tokens(said)],
        "streamed": [
            *(joined(parts, field) for field in ("content", "reasoning_content", "reasoning")),
            thought_tokens(parts[-1]),
        ],
        "parsed": [answer.parsed.model_dump(), answer.reasoning_content, thought_tokens(parsed)],
        "call": [[call.function.name, json.loads(call.function.arguments)], first.reasoning_content],
        "answer": [last.choices[0].message.content, last.choices[0].message.reasoning_content],
        "seen": last.usage.prompt_tokens - forgot.usage.prompt_tokens,
    }


def thought_tokens(completion: Any) -> int:
    return int(completion.usage.completion_tokens_details.reasoning_tokens)


def items(response: Any) -> list[list[Any]]:
    """Each item of a response by its type, with its text or arguments."""
    found = []
    for item in response.output:
        told = json.loads(item.arguments) if item.type == "function_call" else item.content[0].text
        found.append([item.type, told])
    return found


def responses(client: openai.OpenAI, asked: dict[str, Any]) -> dict[str, Any]:
    tools: Any = [{"type": "function", "strict": True, **FUNCTION}]
    asked = {**asked, "reasoning": {"effort": "medium"}, "store": False}
    whole = client.responses.create(input=ASKED, tools=tools, **asked)
    with client.responses.stream(input=ASKED, tools=tools, **asked) as stream:
        events = list(stream)
        streamed = stream.get_final_response()
    result = {"type": "function_call_output", "call_id": whole.output[-1].call_id, "output": RESULT}
    turns: Any = [*ASKED, *whole.output, result]
    last = client.responses.create(input=turns, tools=tools, **asked)
    turns.pop(1)
    forgot = client.responses.create(input=turns, tools=tools, **asked)
    parsed = client.responses.parse(input="Hello", text_format=Weather, **asked)
    return {
        "response": items(whole),
        "response_streamed": items(streamed),
        "events": sorted({event.type for event in events}),
        "deltas": "".join(event.delta for event in events if event.type == "response.reasoning_text.delta"),
        "response_answer": items(last),
        "response_seen": last.usage.input_tokens - forgot.usage.input_tokens,
        "response_parsed": [
            parsed.output_parsed.model_dump(),
            parsed.usage.output_tokens_details.reasoning_tokens,
        ],
    }


with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
    ways = {}
    for way, opens in (("written", False), ("opened", True)):  # who begins the thought: the model or its template
        asked: Any = {"model": name, "temperature": 0, "extra_body": {"chat_template_kwargs": {"opens_thought": opens}}}
        ways[way] = {**chats(client, asked), **responses(client, asked)}
    tell(**ways)
