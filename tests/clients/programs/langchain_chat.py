"""LangChain: a chat model, its stream, an answer of a schema, and an agent that calls a tool."""

from __future__ import annotations

import asyncio
from typing import Literal

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel
from weather import QUESTION, get_weather, place, tell


class Weather(BaseModel):
    """The weather in a city."""

    city: Literal["Paris"]
    degrees: Literal[18]


url, name = place()
model = ChatOpenAI(model=name, base_url=f"{url}/v1", api_key="none", max_retries=0, temperature=0)
said = model.invoke("Hello")
chunks = list(model.stream("Hello", stream_usage=True))
batch = asyncio.run(model.abatch(["Hello"] * 3))
weather = tool(get_weather)
call = model.bind_tools([weather]).invoke(QUESTION)
forced = model.bind_tools([weather], tool_choice="required").invoke(QUESTION)
parsed = {
    method: model.with_structured_output(Weather, method=method).invoke(QUESTION)
    for method in ("json_schema", "function_calling")
}
agent = create_agent(model, [weather]).invoke({"messages": [("user", QUESTION)]})
responses = ChatOpenAI(model=name, base_url=f"{url}/v1", api_key="none", max_retries=0, use_responses_api=True)
told = create_agent(responses, [weather]).invoke({"messages": [("user", QUESTION)]})
completed = OpenAI(model=name, base_url=f"{url}/v1", api_key="none", max_retries=0, max_tokens=4).invoke(
    "<|greeted-plain|>"
)
tell(
    said=said.content,
    tokens=said.usage_metadata["output_tokens"],
    streamed="".join(chunk.content for chunk in chunks),
    streamed_tokens=sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata),
    batch=[one.content for one in batch],
    calls=[[one["name"], one["args"]] for one in call.tool_calls],
    forced=[[one["name"], one["args"]] for one in forced.tool_calls],
    parsed={method: one.model_dump() for method, one in parsed.items()},
    agent=[[message.type, message.text] for message in agent["messages"]],
    responses_agent=[[message.type, message.text] for message in told["messages"]],
    completed=completed,
)
