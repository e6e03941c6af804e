"""The official SDK against the real application."""

from __future__ import annotations

from typing import Any

import openai
import pytest


async def test_chat(sdk: openai.AsyncOpenAI) -> None:
    answer = await sdk.chat.completions.create(
        model="tiny-random", messages=[{"role": "user", "content": "hi"}], max_completion_tokens=5, n=2, logprobs=True
    )
    assert [choice.message.content for choice in answer.choices] == ["The q", "The q"]
    assert answer.choices[1].logprobs is not None


async def test_a_chat_stream(sdk: openai.AsyncOpenAI) -> None:
    stream = await sdk.chat.completions.create(
        model="tiny-random", messages=[{"role": "user", "content": "hi"}], max_tokens=5, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "The q"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 5


async def test_the_stream_helper_of_the_sdk(sdk: openai.AsyncOpenAI) -> None:
    messages: Any = [{"role": "user", "content": "hi"}]
    async with sdk.chat.completions.stream(model="tiny-random", messages=messages, max_tokens=9) as stream:
        final = (
            await stream.get_final_completion()
            if not [event async for event in stream]
            else stream.current_completion_snapshot
        )
    assert final.choices[0].message.content == "The quick"


async def test_completions(sdk: openai.AsyncOpenAI) -> None:
    answer = await sdk.completions.create(model="tiny-random", prompt=["a", "b"], max_tokens=3, logprobs=1)
    assert [choice.text for choice in answer.choices] == ["The", "The"]
    stream = await sdk.completions.create(model="tiny-random", prompt="a", max_tokens=3, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "The"


async def test_errors(sdk: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        await sdk.completions.create(model="gpt-9", prompt="a")
    with pytest.raises(openai.BadRequestError) as caught:
        await sdk.completions.create(model="tiny-random", prompt="a" * 5000)
    assert caught.value.code == "context_length_exceeded"


async def test_models(sdk: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in sdk.models.list()] == ["tiny-random"]
    assert (await sdk.models.retrieve("tiny-random")).owned_by == "diptych"
