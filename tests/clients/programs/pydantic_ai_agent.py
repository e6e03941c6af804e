"""Pydantic AI: an agent with a tool and an answer of a schema, over three APIs; does it send its thoughts back?"""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import anthropic
import openai
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.messages import ModelResponse, TextPart, ThinkingPart, ToolCallPart
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.profiles import ModelProfile
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from weather import QUESTION, get_weather, place, tell

BODIES: list[dict[str, Any]] = []


class Weather(BaseModel):
    """The weather in a city."""

    city: Literal["Paris"]
    degrees: Literal[18]


async def note(request: Any) -> None:
    BODIES.append(json.loads(await request.aread()))


def parts(messages: list[Any]) -> list[list[Any]]:
    """Thoughts, calls and texts of the model, in their order."""
    found = []
    for part in (part for message in messages if isinstance(message, ModelResponse) for part in message.parts):
        if isinstance(part, ToolCallPart):
            found.append([part.part_kind, part.args_as_dict()])
        elif isinstance(part, ThinkingPart):  # of a response: its text is not a summary
            raw = (part.provider_details or {}).get("raw_content", ())
            found.append([part.part_kind, part.content or "".join(raw)])
        elif isinstance(part, TextPart):
            found.append([part.part_kind, part.content])
    return found


def thoughts(body: dict[str, Any]) -> list[Any]:
    """Thoughts in a request, in the form of its API."""
    if "input" in body:
        return [item["content"][0]["text"] for item in body["input"] if item.get("type") == "reasoning"]
    said = [message for message in body["messages"] if message["role"] == "assistant"]
    if isinstance(said[0]["content"], list):
        return [block["thinking"] for block in said[0]["content"] if block["type"] == "thinking"]
    return [message[field] for message in said for field in ("reasoning_content", "reasoning") if field in message]


async def run(model: Any, settings: dict[str, Any]) -> dict[str, Any]:
    settings = {"temperature": 0, **settings}
    agent = Agent(model, tools=[get_weather], model_settings=settings)
    whole = await agent.run(QUESTION)
    sent = thoughts(BODIES[-1])
    async with agent.run_stream(QUESTION) as stream:
        await stream.get_output()
    sent_streamed = thoughts(BODIES[-1])
    structured = Agent(model, tools=[get_weather], output_type=NativeOutput(Weather), model_settings=settings)
    told = await structured.run(QUESTION)
    return {
        "agent": parts(whole.all_messages()),
        "streamed": parts(stream.all_messages()),
        "parsed": told.output.model_dump(),
        "structured": parts(told.all_messages()),
        "sent": sent,
        "sent_streamed": sent_streamed,
    }


async def main() -> None:
    url, name = place()
    hooks: Any = {"event_hooks": {"request": [note]}}
    profile = ModelProfile(supports_json_schema_output=True)
    chats = openai.AsyncOpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=openai.DefaultAsyncHttpxClient(**hooks)
    )
    turns = anthropic.AsyncAnthropic(
        base_url=url, api_key="none", max_retries=0, http_client=anthropic.DefaultAsyncHttpxClient(**hooks)
    )
    ours, theirs = OpenAIProvider(openai_client=chats), AnthropicProvider(anthropic_client=turns)
    opened = {"extra_body": {"chat_template_kwargs": {"opens_thought": True}}}
    thinks = {"max_tokens": 2048, "anthropic_thinking": {"type": "enabled", "budget_tokens": 1024}}
    async with chats, turns:
        tell(
            chat=await run(OpenAIChatModel(name, provider=ours), {}),
            opened=await run(OpenAIChatModel(name, provider=ours), opened),
            responses=await run(OpenAIResponsesModel(name, provider=ours), {}),
            anthropic=await run(AnthropicModel(name, provider=theirs, profile=profile), thinks),
        )


asyncio.run(main())
