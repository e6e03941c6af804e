"""OpenAI's agents SDK: an agent with a tool, over both APIs, streamed and not."""

from __future__ import annotations

import asyncio
from typing import Any

import agents
import openai
from weather import ASKED, QUESTION, get_weather, place, tell


async def run(agent: agents.Agent, *, streamed: bool) -> dict[str, Any]:
    begin = len(ASKED)
    if streamed:
        result: Any = agents.Runner.run_streamed(agent, QUESTION)
        kinds = [event.type async for event in result.stream_events()]
    else:
        result, kinds = await agents.Runner.run(agent, QUESTION), []
    return {
        "answer": result.final_output,
        "items": [item.type for item in result.new_items],
        "events": sorted(set(kinds)),
        "asked": ASKED[begin:],
        "requests": result.context_wrapper.usage.requests,
        "tokens": result.context_wrapper.usage.output_tokens,
    }


async def main() -> None:
    url, name = place()
    agents.set_tracing_disabled(True)
    settings = agents.ModelSettings(include_usage=True)  # else a stream of the older API has none
    tool = agents.function_tool(get_weather)
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        models = {
            "chat": agents.OpenAIChatCompletionsModel(model=name, openai_client=client),
            "responses": agents.OpenAIResponsesModel(model=name, openai_client=client),
        }
        found = {}
        for kind, model in models.items():
            agent = agents.Agent(
                name="clerk", instructions="Tell the weather.", tools=[tool], model=model, model_settings=settings
            )
            for streamed in (False, True):
                found[f"{kind}, {'streamed' if streamed else 'whole'}"] = await run(agent, streamed=streamed)
        tell(**found)


asyncio.run(main())
