"""Hugging Face's client: chats whole, streamed and asynchronous, a tool, a schema, and a prompt in TGI's own format."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import HfHubHTTPError
from weather import ABOUT, NAME, PARAMETERS, QUESTION, get_weather, place, tell

url, name = place()
HELLO: Any = [{"role": "user", "content": "Hello"}]
ASKED: list[Any] = [{"role": "user", "content": QUESTION}]
TOOLS: Any = [{"type": "function", "function": {"name": NAME, "description": ABOUT, "parameters": PARAMETERS}}]
SCHEMA: Any = {"type": "json_schema", "json_schema": {"name": "weather", "schema": PARAMETERS, "strict": True}}
BASE: dict[str, Any] = {"base_url": f"{url}/v1", "api_key": "none"}


def joined(parts: list[Any]) -> str:
    return "".join(part.choices[0].delta.content or "" for part in parts if part.choices)


async def asynchronous() -> str:
    async with AsyncInferenceClient(**BASE) as client:
        return joined([part async for part in await client.chat_completion(HELLO, model=name, stream=True)])


client = InferenceClient(**BASE)
said = client.chat_completion(HELLO, model=name, max_tokens=50, temperature=0.5, seed=1, stop=["zzz"], top_p=0.9)
parts: list[Any] = list(
    client.chat.completions.create(model=name, messages=HELLO, stream=True, stream_options={"include_usage": True})
)
first: Any = client.chat_completion(ASKED, model=name, tools=TOOLS, tool_choice="auto").choices[0].message
call = first.tool_calls[0]
arguments = json.loads(call.function.arguments)
result = {"role": "tool", "tool_call_id": call.id, "content": get_weather(**arguments)}
last: Any = client.chat_completion([*ASKED, first, result], model=name, tools=TOOLS).choices[0].message
parsed = client.chat_completion(HELLO, model=name, response_format=SCHEMA)  # which it sends in TGI's form
refused = []
for path in ("", "/generate"):
    try:
        InferenceClient(url + path, token="none").text_generation("Once upon a time")
    except HfHubHTTPError as error:
        refused.append([error.response.status_code, error.response.json()["error"]["message"]])
tell(
    said=[said.choices[0].message.content, said.usage.completion_tokens],
    reasoning=getattr(said.choices[0].message, "reasoning", None),
    streamed=[joined(parts), parts[-1].usage.completion_tokens],
    asynchronous=asyncio.run(asynchronous()),
    call=[call.function.name, arguments],
    answer=last.content,
    parsed=json.loads(parsed.choices[0].message.content),
    refused=refused,
)
