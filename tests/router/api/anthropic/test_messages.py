"""Anthropic's Messages API, by its official client and by hand."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest
from msgspec.structs import replace

from common.errors import InternalError, Overloaded
from common.model_files.files import ModelFiles
from router.api.anthropic.fields import MessagesRequest
from router.text.text_pipeline import TextPipeline

ARGUMENTS = '{"city": "Paris", "days": [1, 2]}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
TOOLS: Any = [
    {"name": "get_weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}},
    {"name": "now", "description": "the time", "input_schema": {"type": "object"}},
]
HI: Any = [{"role": "user", "content": "hi"}]


def client_of(running: Any) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=running.url, api_key="none", max_retries=0)


@pytest.fixture
async def sdk(running: Any) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with client_of(running) as client:
        yield client


async def post(running: Any, path: str = "/v1/messages", **fields: Any) -> Any:
    return await running.http.post(path, json={"messages": HI, "max_tokens": 9, **fields})


def chat_of(**fields: Any) -> list[dict[str, Any]]:
    """The chat messages that a request means."""
    request = MessagesRequest.model_validate({"max_tokens": 1, **fields}, strict=True)
    return [message.as_dict() for message in request.as_chat().messages]


async def test_a_message(sdk: anthropic.AsyncAnthropic) -> None:
    message = await sdk.messages.create(model="tiny-random", max_tokens=9, messages=HI, system="Be brief.")
    assert message.content[0].model_dump(exclude_none=True) == {"type": "text", "text": "The quick"}
    assert (message.role, message.stop_reason, message.stop_sequence) == ("assistant", "max_tokens", None)
    assert message.id.startswith("msg") and message.model == "tiny-random"
    assert message.usage.output_tokens == 9 and message.usage.input_tokens > 2


async def test_a_stream(sdk: anthropic.AsyncAnthropic) -> None:
    async with sdk.messages.stream(model="tiny-random", max_tokens=9, messages=HI) as stream:
        pieces = [text async for text in stream.text_stream]
        message = await stream.get_final_message()
    assert len(pieces) > 1 and "".join(pieces) == "The quick"
    assert message.content[0].model_dump(include={"type", "text"}) == {"type": "text", "text": "The quick"}
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 9)


async def test_the_events_of_a_stream(running: Any) -> None:
    reply = await post(running, stream=True, max_tokens=2)
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = [event.split("\n") for event in reply.text.split("\n\n") if event]
    assert all(name == f"event: {json.loads(data.removeprefix('data: '))['type']}" for name, data in events)
    kinds = [name.removeprefix("event: ") for name, _ in events]
    deltas = ["content_block_delta"] * kinds.count("content_block_delta")
    assert kinds == [
        "message_start", "content_block_start", *deltas, "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip


async def test_an_end_by_itself_and_by_a_stop_sequence(start: Any, tools: Any) -> None:
    running = await start(tools.Engine(eos_after=5))
    message = (await post(running)).json()
    assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)
    message = (await post(running, stop_sequences=["zzz", "e"])).json()
    assert (message["content"], message["stop_reason"], message["stop_sequence"]) == (
        [{"type": "text", "text": "Th"}], "stop_sequence", "e",
    )  # fmt: skip


async def test_an_answer_without_text_has_an_empty_block(start: Any, tools: Any) -> None:
    running = await start(tools.Engine(eos_after=0))
    assert (await post(running)).json()["content"] == [{"type": "text", "text": ""}]
    async with client_of(running) as sdk, sdk.messages.stream(model="tiny-random", max_tokens=9, messages=HI) as stream:
        assert (await stream.get_final_message()).content[0].text == ""  # type: ignore[union-attr]


async def test_what_was_cached_is_counted_apart(start: Any, tools: Any) -> None:
    running = await start(tools.Engine(cached=2))
    usage = (await post(running)).json()["usage"]
    assert usage["cache_read_input_tokens"] == 2 and usage["cache_creation_input_tokens"] == 0
    assert usage["input_tokens"] + 2 == len(running.engine.requests[0].prompt_token_ids)


async def test_fields_reach_the_workers(running: Any) -> None:
    await post(
        running, temperature=0.5, top_p=0.9, top_k=7, stop_sequences=["x"], metadata={"user_id": "me"},
        thinking={"type": "disabled"}, service_tier="auto", system=None,
    )  # fmt: skip
    params = running.engine.requests[0].params
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.5, 0.9, 7, 9)


async def test_its_prompt_is_that_of_the_same_conversation(running: Any) -> None:
    blocks = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    turns = [{"role": "user", "content": blocks}, {"role": "assistant", "content": "c"}, *HI]
    await post(running, messages=turns, system=[{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}])
    same = [("system", "s"), ("user", "a\nb"), ("assistant", "c"), ("user", "hi")]
    await running.chat(messages=[{"role": role, "content": content} for role, content in same])
    first, second = running.engine.requests
    assert first.prompt_token_ids == second.prompt_token_ids


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        ("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}", "<system>r\ns<user>a\nb"),
        (
            "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}"
            "{% else %}{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endif %}{% endfor %}",
            "<system>[r][s]<user>[a][b]",
        ),
    ],
)
async def test_text_parts_make_the_same_prompt_in_every_api(
    start: Any, tools: Any, files: ModelFiles, template: str, shown: str
) -> None:
    """The template joins them, if it reads lists; line breaks do, if it does not."""
    pipeline = TextPipeline.from_files(replace(files, chat_template=template), threads=1)
    running = await start(tools.Engine(), pipeline=pipeline)

    def parts(kind: str, *texts: str) -> list[dict[str, str]]:
        return [{"type": kind, "text": text} for text in texts]

    system, user = ("r", "s"), ("a", "b")
    both = [{"role": "system", "content": parts("text", *system)}, {"role": "user", "content": parts("text", *user)}]
    await running.chat(messages=both, max_tokens=1)
    turn = {"role": "user", "content": parts("text", *user)}
    assert (await post(running, system=parts("text", *system), messages=[turn])).status_code == 200
    items = [
        {"role": "system", "content": parts("input_text", *system)},
        {"role": "user", "content": parts("input_text", *user)},
    ]
    assert (await running.http.post("/v1/responses", json={"input": items, "max_output_tokens": 1})).status_code == 200
    found = [bytes(list(request.prompt_token_ids)).decode() for request in running.engine.requests]
    tokens = (await running.http.post("/tokenize", json={"messages": both})).json()["tokens"]
    pipeline.close()
    assert [*found, bytes(tokens).decode()] == [shown] * 4


async def test_an_answer_begun_by_the_client_goes_on(running: Any) -> None:
    begun = [*HI, {"role": "assistant", "content": "The answer is"}]
    await post(running, messages=begun)
    await running.chat(messages=begun, continue_final_message=True)
    first, second = running.engine.requests
    assert first.prompt_token_ids == second.prompt_token_ids


async def test_calls(start: Any, tools: Any) -> None:
    text = f"I look. {CALL}\n{OTHER}"
    running = await start(tools.Engine(text=text, eos_after=len(text.encode()), per_event=3))
    async with client_of(running) as sdk:
        whole = await sdk.messages.create(model="tiny-random", max_tokens=900, messages=HI, tools=TOOLS)
        async with sdk.messages.stream(model="tiny-random", max_tokens=900, messages=HI, tools=TOOLS) as stream:
            streamed = await stream.get_final_message()
    for message in (whole, streamed):
        assert message.stop_reason == "tool_use"
        said, first, second = [block.model_dump() for block in message.content]
        assert (said["type"], said["text"]) == ("text", "I look. ")
        assert (first["type"], first["name"], first["input"]) == ("tool_use", "get_weather", json.loads(ARGUMENTS))
        assert (second["name"], second["input"]) == ("now", {})
        assert first["id"] != second["id"]


async def test_a_call_alone_has_no_text_block(start: Any, tools: Any) -> None:
    running = await start(tools.Engine(text=OTHER, eos_after=len(OTHER)))
    assert [block["type"] for block in (await post(running, max_tokens=999, tools=TOOLS)).json()["content"]] == [
        "tool_use"
    ]


async def test_numbers_beyond_a_double_do_not_empty_the_input(start: Any, tools: Any) -> None:
    call = CALL.replace(ARGUMENTS, '{"city": "x", "n": 1e999}')
    running = await start(tools.Engine(text=call, eos_after=len(call)))
    reply = await running.http.post("/v1/messages", json={"messages": HI, "max_tokens": 900, "tools": TOOLS})
    assert reply.json()["content"][0]["input"] == {"city": "x", "n": float("inf")} and "1e999" in reply.text


async def test_a_call_that_is_cut_off_has_no_input(start: Any, tools: Any) -> None:
    running = await start(tools.Engine(text=CALL))
    message = (await post(running, tools=TOOLS, max_tokens=CALL.index('"Paris"'))).json()
    assert message["stop_reason"] == "max_tokens"
    assert (message["content"][0]["name"], message["content"][0]["input"]) == ("get_weather", {})


@pytest.mark.parametrize(
    ("choice", "ours"),
    [
        ({"type": "auto"}, ("auto", True)),
        ({"type": "any", "disable_parallel_tool_use": True}, ("required", False)),
        ({"type": "none"}, ("none", True)),
    ],
)
def test_choices_of_tools(choice: dict[str, Any], ours: tuple[str, bool]) -> None:
    chat = MessagesRequest.model_validate(
        {"messages": HI, "max_tokens": 1, "tools": TOOLS, "tool_choice": choice}
    ).as_chat()
    assert (chat.tool_choice, chat.parallel_tool_calls) == ours


def test_one_tool_by_name() -> None:
    fields = {"messages": HI, "max_tokens": 1, "tools": TOOLS, "tool_choice": {"type": "tool", "name": "now"}}
    chosen = MessagesRequest.model_validate(fields).as_chat().tool_choice
    assert not isinstance(chosen, str) and chosen is not None and chosen.function.name == "now"


def test_calls_and_their_results_become_messages() -> None:
    turns = [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "c1", "name": "get_weather", "input": {"city": "Paris"}},
                {"type": "tool_use", "id": "c2", "name": "now", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "21 C"}]},
                {"type": "tool_result", "tool_use_id": "c2", "content": "noon", "is_error": False},
                {"type": "text", "text": "and now?"},
            ],
        },
    ]  # fmt: skip
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city":"Paris"}'}},
        {"id": "c2", "type": "function", "function": {"name": "now", "arguments": "{}"}},
    ]
    assert chat_of(messages=turns) == [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "I look.", "tool_calls": calls, "reasoning_content": "hm"},
        {"role": "tool", "content": "21 C", "tool_call_id": "c1"},
        {"role": "tool", "content": "noon", "tool_call_id": "c2"},
        {"role": "user", "content": "and now?"},
    ]


def test_a_call_without_text_has_none() -> None:
    turns = [*HI, {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "now", "input": {}}]}]
    assert chat_of(messages=turns)[1]["content"] is None


async def test_tokens_are_counted(running: Any, sdk: anthropic.AsyncAnthropic) -> None:
    for extra in ({}, {"system": "Be brief.", "tools": TOOLS}):
        counted = await sdk.messages.count_tokens(model="tiny-random", messages=HI, **extra)
        usage = (await post(running, **extra)).json()["usage"]
        assert counted.input_tokens == usage["input_tokens"] > 0


BLOCK = {"type": "text", "text": "x"}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}}
RESULT = {"type": "search_result", "source": "https://a.example", "title": "A", "content": [BLOCK]}
REFERENCE = {"type": "tool_reference", "tool_name": "never"}
LOADED = {"type": "tool_result", "tool_use_id": "c1", "content": [REFERENCE]}


def of(block: dict[str, Any], role: str = "user") -> dict[str, Any]:
    """The messages of a conversation with a block."""
    return {"messages": [{"role": role, "content": [BLOCK, block]}]}


def test_documents_and_search_results_are_text_in_the_prompt() -> None:
    text = {"type": "text", "media_type": "text/plain", "data": "The sky\nis blue."}
    document = {"type": "document", "source": text, "title": "Sky", "context": "From a book."}
    parts = {"type": "document", "source": {"type": "content", "content": [BLOCK, BLOCK]}, "citations": None}
    question = {"type": "text", "text": "Why?"}
    (turn,) = chat_of(messages=[{"role": "user", "content": [document, RESULT, parts, question]}])
    assert [part["text"] for part in turn["content"]] == [
        "<document>\n<title>Sky</title>\n<context>From a book.</context>\n"
        "<content>\nThe sky\nis blue.\n</content>\n</document>",
        "<search_result>\n<title>A</title>\n<source>https://a.example</source>\n"
        "<content>\nx\n</content>\n</search_result>",
        "<document>\n<content>\nx\nx\n</content>\n</document>",
        "Why?",
    ]


def test_a_document_of_many_parts_is_translated_in_a_thread() -> None:
    for num_parts, is_long in ((2, False), (300, True)):
        parts = {"type": "document", "source": {"type": "content", "content": [BLOCK] * num_parts}}
        request = MessagesRequest.model_validate({"max_tokens": 1, **of(parts)}, strict=True)
        assert request.is_long is is_long


def test_the_result_of_a_call_may_be_documents() -> None:
    call = {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "now"}]}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [RESULT], "is_error": True}
    *_, found = chat_of(messages=[*HI, call, {"role": "user", "content": [result]}])
    assert found["role"] == "tool" and found["content"].startswith("Error: <search_result>\n<title>A</title>")


def test_deferred_tools_are_those_that_a_result_refers_to() -> None:
    now, never = TOOLS[1], {"name": "never", "input_schema": {"type": "object"}, "defer_loading": True}
    later = {"name": "later", "input_schema": {"type": "object"}, "defer_loading": True}

    def chat(*turns: Any) -> Any:
        fields = {"max_tokens": 1, "messages": [*HI, *turns], "tools": [now, never, later]}
        return MessagesRequest.model_validate(fields, strict=True).as_chat()

    assert [tool.function.name for tool in chat().tools] == ["now"]
    call = {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "now"}]}
    found = chat(call, {"role": "user", "content": [LOADED]})
    assert [tool.function.name for tool in found.tools] == ["now", "never"]
    assert found.messages[-1].content == "<tool_reference>never</tool_reference>"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, r"messages\[0\].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, r"content\[0\].type: 'image'"),
        (of({"type": "document"}), r"content\[1\].source: is required"),
        (of({"type": "document", "source": {"type": "text"}}), r"content\[1\].source.data: is required"),
        (of(PDF), r"content\[1\].source.type: 'base64' is not supported, because this server does not read PDF files"),
        (of(RESULT | {"citations": {"enabled": True}}), r"content\[1\].citations.enabled: true is not supported"),
        (of(RESULT | {"content": [{"type": "image"}]}), r"content\[1\].content\[0\].type: 'image'"),
        (of(RESULT | {"source": None}), r"content\[1\].source: is required"),
        (of(PDF | {"source": {"type": "text", "data": "x"}}, role="assistant"), r"content\[1\].type: 'document' here"),
        ({**of(LOADED), "tools": TOOLS}, r"content\[1\].content\[0\].tool_name: 'never' is not in tools"),
        ({"messages": [{"role": "user", "content": [BLOCK, {"type": "tool_use", "id": "a"}]}]}, r"content\[1\].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, r"content\[0\].text: is required"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, "must have an id and a name"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id: is required"),
        ({"messages": [{"role": "user", "content": []}]}, "must contain text"),
        ({"system": [{"type": "image"}]}, r"system\[0\].type: 'image'"),
        ({"thinking": {"type": "maybe"}}, "thinking.type"),
        ({"temperature": 1.5}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"stop_sequences": [""]}, r"stop_sequences\[0\]"),
        ({"stop_sequences": ["a"] * 65}, "stop_sequences"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, r"tools\[0\].type"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name: is required"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "other"}}, "is not in tools"),
        ({"tool_choice": {"type": "any"}}, "at least one tool"),
        ({"max_tokens": 10**6}, "1000000"),
    ],
)
async def test_what_is_wrong_is_said(running: Any, fields: dict[str, Any], said: str) -> None:
    reply = await post(running, **fields)
    assert reply.status_code == 400, reply.text
    body = reply.json()
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert re.search(said, body["error"]["message"]), body
    assert running.engine.requests == []


async def test_errors_have_the_types_of_its_client(start: Any, tools: Any) -> None:
    running = await start(api_key="sesame")
    async with client_of(running) as sdk:
        asked: Any = {"model": "tiny-random", "max_tokens": 9, "messages": HI}
        with pytest.raises(anthropic.AuthenticationError) as caught:
            await sdk.messages.create(**asked)
        body: Any = caught.value.body
        assert (body["type"], body["error"]["type"]) == ("error", "authentication_error")
        known = sdk.with_options(api_key="sesame")
        with pytest.raises(anthropic.NotFoundError):
            await known.messages.create(**asked | {"model": "gpt"})
        message = await known.messages.create(**asked)
        assert message.stop_reason == "max_tokens"
    running = await start(tools.Engine(full=Overloaded("full", retry_after_s=7)))
    async with client_of(running) as sdk:
        with pytest.raises(anthropic.RateLimitError) as limited:
            await sdk.messages.create(model="tiny-random", max_tokens=9, messages=HI)
        assert limited.value.response.headers["retry-after"] == "7"


async def test_a_stream_that_breaks_says_so(start: Any, tools: Any) -> None:
    running = await start(tools.Engine(error=InternalError("broken"), error_after=3))
    reply = await post(running, stream=True)
    *_, last = [event for event in reply.text.split("\n\n") if event]
    name, data = last.split("\n")
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: ")) == {
        "type": "error", "error": {"type": "api_error", "message": "broken"},
    }  # fmt: skip


async def test_errors_elsewhere_are_openais(running: Any) -> None:
    assert (await post(running, "/v1/completions")).json().keys() == {"error"}
    assert (await post(running, "/v1/messages/nothing")).json()["error"]["type"] == "not_found_error"


async def test_a_large_conversation(running: Any) -> None:
    turns = [{"role": "user", "content": [{"type": "text", "text": "x" * 100}] * 30}] * 100
    reply = await post(running, messages=turns)
    assert reply.status_code == 400 and "tokens" in reply.json()["error"]["message"]


async def test_a_long_conversation_is_translated_apart(running: Any) -> None:
    reply = await post(running, messages=[{"role": "user", "content": ""}] * 1500)
    assert reply.status_code == 400 and "tokens" in reply.json()["error"]["message"]  # of the template's marks
    reply = await post(running, messages=[{"role": "user", "content": [{"type": "image"}]}] * 1500)
    assert reply.status_code == 400 and "messages[0].content[0].type" in reply.json()["error"]["message"]


async def test_too_many_blocks_are_not_looked_at(running: Any) -> None:
    reply = await post(running, messages=[{"role": "user", "content": [BLOCK] * 9000}] * 3)
    assert reply.status_code == 400 and "at most 10000 parts" in reply.json()["error"]["message"]
