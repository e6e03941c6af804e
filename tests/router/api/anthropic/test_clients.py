"""Features of Anthropic's official client beside plain messages: tool runners, forms of answers, models, overflows."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest
from anthropic import beta_async_tool
from anthropic.lib.tools import ToolError
from pydantic import BaseModel

from router.api.anthropic.fields import MessagesRequest
from router.request.fields import thinking_switches

from ...answers import is_answer

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
HI: Any = [{"role": "user", "content": "hi"}]
ASKED: Any = {"model": "tiny-random", "max_tokens": 900, "messages": HI}


@pytest.fixture
async def sdk(running: Any) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=running.url, api_key="none", max_retries=0) as client:
        yield client


def prompts(running: Any, text: Any) -> list[str]:
    """The prompts of all requests."""
    decode = text.tokenizer.decode
    return [decode(request.prompt_token_ids, skip_special_tokens=False) for request in running.engine.requests]


def say(engine: Any, text: str) -> None:
    engine.text, engine.eos_after = text, len(text.encode())


async def test_the_client_gets_the_id_of_each_request(running: Any, sdk: anthropic.AsyncAnthropic) -> None:
    headers = {"x-request-id": "trace-7"}
    assert (await sdk.messages.create(**ASKED, extra_headers=headers))._request_id == "trace-7"
    async with sdk.messages.stream(**ASKED, extra_headers=headers) as stream:
        assert stream.request_id == "trace-7"
    with pytest.raises(anthropic.BadRequestError) as refused:
        await sdk.messages.create(**ASKED | {"max_tokens": -1}, extra_headers=headers)
    assert refused.value.request_id == "trace-7"
    assert (await sdk.models.retrieve("tiny-random", extra_headers=headers))._request_id == "trace-7"
    assert "request-id" not in (await running.completion()).headers


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_runner_asks_with_the_whole_conversation(
    running: Any, sdk: anthropic.AsyncAnthropic, text: Any, stream: bool
) -> None:
    say(running.engine, CALL)

    @beta_async_tool
    async def get_weather(city: str) -> str:
        """The weather of a city."""
        say(running.engine, "It is sunny.")
        return f"sun over {city}"

    runner: Any = sdk.beta.messages.tool_runner(tools=[get_weather], stream=stream, **ASKED)
    final = await runner.until_done()
    assert [block.text for block in final.content] == ["It is sunny."]
    first, second = prompts(running, text)
    assert "hi" in first and all(said in second for said in ("hi", "get_weather", "sun over Paris"))


async def test_a_tool_that_fails_says_so_to_the_model(running: Any, sdk: anthropic.AsyncAnthropic, text: Any) -> None:
    say(running.engine, CALL)

    @beta_async_tool
    async def get_weather(city: str) -> str:
        """The weather of a city."""
        say(running.engine, "Sorry.")
        raise ToolError("no such city")

    await sdk.beta.messages.tool_runner(tools=[get_weather], **ASKED).until_done()
    assert "Error: no such city" in prompts(running, text)[1]


@pytest.mark.parametrize("thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}])
async def test_a_thread_is_refused_in_the_words_that_clients_know(
    running: Any, sdk: anthropic.AsyncAnthropic, thread: Any
) -> None:
    with pytest.raises(anthropic.BadRequestError, match="thread") as caught:
        await sdk.beta.messages.create(thread=thread, **ASKED)
    body: Any = caught.value.body
    assert body["error"]["details"] == {"error_code": "thread_unsupported_request"}
    assert not running.engine.requests


class Weather(BaseModel):
    city: str
    days: list[int]


SCHEMA = {"type": "object", "properties": {"city": {"const": "Rome"}}, "required": ["city"]}


@pytest.mark.slow
async def test_an_answer_in_a_form(running: Any, sdk: anthropic.AsyncAnthropic) -> None:
    say(running.engine, '{"city":"Rome","days":[1]}')
    for messages in (sdk.messages, sdk.beta.messages):
        parsed = await messages.parse(output_format=Weather, **ASKED)
        assert parsed.parsed_output == Weather(city="Rome", days=[1])
    for request in running.engine.requests:
        assert is_answer(request.params.grammar, '{"city":"Rome","days":[1]}')
        assert not is_answer(request.params.grammar, '{"city":"Rome"}')


@pytest.mark.parametrize("old", [False, True])
async def test_both_names_of_the_form(running: Any, old: bool) -> None:
    form = {"type": "json_schema", "schema": SCHEMA}
    fields = {"output_format": form} if old else {"output_config": {"format": form}}
    reply = await running.http.post("/v1/messages", json=ASKED | fields)
    assert reply.status_code == 200
    assert is_answer(running.engine.requests[0].params.grammar, '{"city":"Rome"}')


async def test_a_form_that_cannot_be_had_is_named(running: Any) -> None:
    form = {"type": "json_schema", "schema": {"type": "nothing"}}
    reply = await running.http.post("/v1/messages", json=ASKED | {"output_config": {"format": form}})
    assert reply.status_code == 400
    assert reply.json()["error"]["message"].startswith("output_config.format.schema: ")


async def test_models(running: Any, sdk: anthropic.AsyncAnthropic) -> None:
    (model,) = [model async for model in sdk.models.list(limit=1)]
    assert (model.type, model.id, model.display_name) == ("model", "tiny-random", "tiny-random")
    assert model.max_input_tokens == 4096 and model.created_at.year >= 2025
    assert await sdk.models.retrieve("tiny-random") == model
    page = await sdk.models.list()
    assert (page.has_more, page.first_id, page.last_id) == (False, "tiny-random", "tiny-random")
    assert (await sdk.models.list(after_id="tiny-random")).data == []
    with pytest.raises(anthropic.NotFoundError) as caught:
        await sdk.models.retrieve("claude")
    body: Any = caught.value.body
    assert body["error"]["type"] == "not_found_error"


async def test_a_prompt_that_is_too_long_is_said_as_anthropic_does(sdk: anthropic.AsyncAnthropic) -> None:
    long: Any = [{"role": "user", "content": "x" * 5000}]
    for max_tokens, messages, said in (
        (9, long, r"prompt is too long: \d+ tokens > 4095 maximum"),
        (4096, HI, r"input length and `max_tokens` exceed context limit: \d+ \+ 4096 > 4096, decrease"),
    ):
        with pytest.raises(anthropic.BadRequestError, match=said):
            await sdk.messages.create(model="tiny-random", max_tokens=max_tokens, messages=messages)


@pytest.mark.parametrize(("display", "shown"), [(None, True), ("summarized", True), ("omitted", False)])
def test_a_thought_that_is_not_to_be_shown(display: str | None, shown: bool) -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024, "display": display}
    chat = MessagesRequest.model_validate({"messages": HI, "max_tokens": 1, "thinking": thinking}).as_chat()
    assert (chat.include_reasoning, chat.chat_template_kwargs) == (shown, thinking_switches(True))
