"""Anthropic's SDK with thinking and tools, streamed and not, and its tool runner."""

from __future__ import annotations

from typing import Any

import anthropic
from anthropic import beta_tool
from weather import ABOUT, ASKED, NAME, PARAMETERS, QUESTION, RESULT, get_weather, place, tell

url, name = place()
TOOL: Any = {"name": NAME, "description": ABOUT, "input_schema": PARAMETERS}
TURNS: list[Any] = [{"role": "user", "content": QUESTION}]
THINKING: Any = {"type": "enabled", "budget_tokens": 1024}


def blocks(message: Any) -> list[Any]:
    """Each block of an answer by its type, with its text or its input."""
    fields = {"thinking": "thinking", "text": "text", "tool_use": "input"}
    return [[block.type, getattr(block, fields[block.type])] for block in message.content]


def tokens(message: Any) -> int:
    """Number of tokens of the prompt."""
    return int(message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0))


with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
    asked: dict[str, Any] = {"model": name, "max_tokens": 2048, "tools": [TOOL]}
    whole = client.messages.create(messages=TURNS, thinking=THINKING, **asked)
    with client.messages.stream(messages=TURNS, thinking=THINKING, **asked) as stream:
        events = [event.type for event in stream]
        streamed = stream.get_final_message()
    plain = client.messages.create(messages=TURNS, **asked)
    call = next(block for block in whole.content if block.type == "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": RESULT}]}
    turns = [*TURNS, {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
    after = client.messages.create(messages=turns, thinking=THINKING, **asked)
    turns[1] = {"role": "assistant", "content": [call]}
    forgot = client.messages.create(messages=turns, thinking=THINKING, **asked)
    turns[1] = {"role": "assistant", "content": streamed.content}
    opened: Any = {"extra_body": {"chat_template_kwargs": {"opens_thought": True}}}
    with client.messages.stream(messages=turns, thinking=THINKING, **asked, **opened) as stream:
        deltas = [event.delta.type for event in stream if event.type == "content_block_delta"]
        told = stream.get_final_message()
    runner = client.beta.messages.tool_runner(
        model=name, max_tokens=2048, messages=TURNS, tools=[beta_tool(get_weather)], thinking=THINKING
    )
    last = runner.until_done()
    counted = client.messages.count_tokens(model=name, messages=TURNS, tools=[TOOL], thinking=THINKING)
    tell(
        whole=blocks(whole),
        stop_reason=whole.stop_reason,
        streamed=blocks(streamed),
        events=sorted(set(events)),
        plain=blocks(plain),
        after=blocks(after),
        told=blocks(told),
        deltas=sorted(set(deltas)),
        signed=[message.content[0].signature for message in (whole, streamed)],
        seen=tokens(after) - tokens(forgot),
        runner=blocks(last),
        counted=counted.input_tokens,
        input_tokens=tokens(whole),
    )
    assert ASKED
