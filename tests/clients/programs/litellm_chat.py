"""LiteLLM, with the three providers that fit: plain OpenAI, a hosted vLLM, and Anthropic's API."""

from __future__ import annotations

import asyncio
from typing import Any

import litellm
from weather import ABOUT, NAME, PARAMETERS, QUESTION, RESULT, place, tell

url, name = place()
TOOL: dict[str, Any] = {"type": "function", "function": {"name": NAME, "description": ABOUT, "parameters": PARAMETERS}}
HELLO = [{"role": "user", "content": "Hello"}]
PROVIDERS = {"openai": f"{url}/v1", "hosted_vllm": f"{url}/v1", "anthropic": url}


def told(provider: str, base: str) -> dict[str, Any]:
    asked: dict[str, Any] = {"model": f"{provider}/{name}", "api_base": base, "api_key": "none", "max_tokens": 200}
    said = litellm.completion(messages=HELLO, **asked)
    parts = list(litellm.completion(messages=HELLO, stream=True, stream_options={"include_usage": True}, **asked))
    turns: list[Any] = [{"role": "user", "content": QUESTION}]
    first = litellm.completion(messages=turns, tools=[TOOL], **asked).choices[0].message
    call = first.tool_calls[0]
    turns += [first, {"role": "tool", "tool_call_id": call.id, "content": RESULT}]
    last = litellm.completion(messages=turns, tools=[TOOL], **asked).choices[0].message
    streamed = [
        part.choices[0].delta for part in litellm.completion(messages=turns[:1], tools=[TOOL], stream=True, **asked)
    ]
    pieces = [piece for delta in streamed for piece in delta.tool_calls or ()]
    return {
        "said": said.choices[0].message.content,
        "tokens": said.usage.completion_tokens,
        "reasoning": getattr(said.choices[0].message, "reasoning_content", None),
        "streamed": "".join(part.choices[0].delta.content or "" for part in parts if part.choices),
        "call": [call.function.name, call.function.arguments],
        "streamed_call": [
            "".join(piece.function.name or "" for piece in pieces),
            "".join(piece.function.arguments or "" for piece in pieces),
        ],
        "answer": last.content,
    }


async def overflow() -> str:
    """LiteLLM tells a prompt that is too long by the words of the error, and routers of it go elsewhere then."""
    try:
        await litellm.acompletion(
            model=f"openai/{name}",
            api_base=f"{url}/v1",
            api_key="none",
            messages=[{"role": "user", "content": "x" * 300_000}],
        )
    except litellm.exceptions.ContextWindowExceededError:
        return "ContextWindowExceededError"
    except Exception as error:
        return type(error).__name__
    return ""


text = litellm.text_completion(
    model=f"text-completion-openai/{name}",
    api_base=f"{url}/v1",
    api_key="none",
    prompt="<|greeted-plain|>",
    max_tokens=4,
)
responses = litellm.responses(model=f"openai/{name}", api_base=f"{url}/v1", api_key="none", input="Hello")
tell(
    **{provider: told(provider, base) for provider, base in PROVIDERS.items()},
    text=text.choices[0].text,
    responses=[item.content[0].text for item in responses.output if item.type == "message"],
    overflow=asyncio.run(overflow()),
)
