"""LlamaIndex: a chat model, its stream, an answer of a schema, and an agent that calls a tool."""

from __future__ import annotations

import asyncio
from typing import Literal

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel
from weather import QUESTION, get_weather, place, tell


class Weather(BaseModel):
    """The weather in a city."""

    city: Literal["Paris"]
    degrees: Literal[18]


async def ask_agent() -> str:
    agent = FunctionAgent(tools=[FunctionTool.from_defaults(get_weather)], llm=model, streaming=True)
    return str(await agent.run(QUESTION))


url, name = place()
model = OpenAILike(
    model=name, api_base=f"{url}/v1", api_key="none", is_chat_model=True, is_function_calling_model=True,
    context_window=4096, max_retries=0, temperature=0,
)  # fmt: skip
hello = [ChatMessage(role="user", content="Hello")]
said = model.chat(hello)
streamed = [part.delta for part in model.stream_chat(hello)]
parsed = model.as_structured_llm(Weather).chat([ChatMessage(role="user", content=QUESTION)]).raw
completed = model.complete("Hello").text
answer = asyncio.run(ask_agent())
tell(
    said=said.message.content,
    streamed="".join(part or "" for part in streamed),
    parsed=parsed.model_dump(),
    completed=completed,
    agent=answer,
)
