"""Streamed answers with calls, when assembled, equal the answers that are not streamed, in all three APIs."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import anthropic
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ...examples import examples

ARGUMENTS = '{"city": "Paris", "days": [1, 2]}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
NAMES = ("now", "get_weather")
CHAT_TOOLS: Any = [{"type": "function", "function": {"name": name}} for name in NAMES]
RESPONSES_TOOLS: Any = [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in NAMES]
MESSAGES_TOOLS: Any = [{"name": name, "input_schema": {"type": "object"}} for name in NAMES]
HI: Any = [{"role": "user", "content": "hi"}]
MODEL = "tiny-random"
APIS = ("chat", "responses", "messages")

Item = str | tuple[str, str]
"""A part of an answer: a text, or a call's name and arguments."""


@dataclass
class Answer:
    """An answer as the client gets it. `items` are in the order of the answer, if its API has one."""

    items: list[Item]
    reason: str | None
    logprobs: Any = None


class Client:
    """Request one answer, whole, or streamed and assembled by the official SDK."""

    def __init__(self, url: str) -> None:
        self.with_logprobs = True
        self.openai = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        self.anthropic = anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0)

    def __repr__(self) -> str:
        return "a client"

    async def close(self) -> None:
        await self.openai.close()
        await self.anthropic.close()

    async def ask(
        self, api: str, *, stream: bool, max_tokens: int = 3000, required: bool = False, stops: Sequence[str] = ()
    ) -> Answer:
        ask = {"chat": self._chat, "responses": self._response, "messages": self._message}[api]
        return await ask(stream, max_tokens, required, list(stops))

    async def _chat(self, stream: bool, max_tokens: int, required: bool, stops: list[str]) -> Answer:
        asked: Any = {
            "model": MODEL, "messages": HI, "tools": CHAT_TOOLS, "max_tokens": max_tokens,
            "logprobs": self.with_logprobs,
            "tool_choice": "required" if required else "auto", "stop": stops or None,
        }  # fmt: skip
        if stream:
            async with self.openai.chat.completions.stream(**asked) as events:
                async for _ in events:
                    continue
                completion = events.current_completion_snapshot
        else:
            completion = await self.openai.chat.completions.create(**asked)
        (choice,) = completion.choices
        calls = [(call.function.name, call.function.arguments or "") for call in choice.message.tool_calls or ()]
        with_logprobs = [token.model_dump() for token in (choice.logprobs and choice.logprobs.content) or ()]
        return Answer([*filter(None, [choice.message.content]), *calls], choice.finish_reason, with_logprobs)

    async def _response(self, stream: bool, max_tokens: int, required: bool, stops: list[str]) -> Answer:
        asked: Any = {
            "model": MODEL, "input": "hi", "tools": RESPONSES_TOOLS, "max_output_tokens": max_tokens,
            "include": ["message.output_text.logprobs"], "tool_choice": "required" if required else "auto",
            "extra_body": {"stop": stops or None},
        }  # fmt: skip
        with_logprobs: list[Any] = []
        if stream:
            async with self.openai.responses.stream(**asked) as events:
                async for event in events:
                    if event.type == "response.output_text.delta":
                        with_logprobs += [token.token for token in event.logprobs]
                    if event.type in ("response.completed", "response.incomplete"):
                        response = event.response  # type: ignore[assignment]
        else:
            response = await self.openai.responses.create(**asked)
        items: list[Item] = []
        whole: list[Any] = []
        for item in response.output:
            if item.type == "function_call":
                items.append((item.name, item.arguments))
            elif item.type == "message":
                items += [part.text for part in item.content if part.type == "output_text"]
                whole += [token.token for part in item.content for token in part.logprobs or ()]  # type: ignore[union-attr]
        assert not stream or whole == with_logprobs
        statuses = [getattr(item, "status", None) for item in response.output]
        return Answer([*filter(None, items)], response.status, [whole, statuses])

    async def _message(self, stream: bool, max_tokens: int, required: bool, stops: list[str]) -> Answer:
        asked: Any = {
            "model": MODEL, "messages": HI, "tools": MESSAGES_TOOLS, "max_tokens": max_tokens,
            "tool_choice": {"type": "any" if required else "auto"}, "stop_sequences": stops,
        }  # fmt: skip
        if stream:
            async with self.anthropic.messages.stream(**asked) as events:
                message: Any = await events.get_final_message()
        else:
            message = await self.anthropic.messages.create(**asked)
        items = [
            block.text if block.type == "text" else (block.name, json.dumps(block.input)) for block in message.content
        ]
        return Answer([*filter(None, items)], message.stop_reason)


@pytest.fixture
def engine(tools: Any) -> Any:
    """Generates one text in events of the given sizes, the last of which repeats."""

    class Divided(tools.Engine):  # type: ignore[misc, name-defined]
        sizes: Sequence[int] = (1,)

        def __repr__(self) -> str:  # hypothesis shows it
            return "an engine"

        def say(self, text: str, sizes: Sequence[int] = (1,)) -> None:
            self.text, self.eos_after, self.sizes = text, len(text.encode()), sizes

        async def _events(self, request: Any) -> AsyncIterator[Any]:
            self.per_event = 1
            sizes, tokens, logprobs, size = list(self.sizes), [], [], 0
            async for event in super()._events(request):
                tokens += event.token_ids
                logprobs += event.logprobs
                size = size or (sizes.pop(0) if len(sizes) > 1 else sizes[0])
                if len(tokens) >= size or event.finish_reason:
                    yield type(event)(tuple(tokens), tuple(logprobs), event.finish_reason, 0, event.timeline)
                    tokens, logprobs, size = [], [], 0

    return Divided()


@pytest.fixture
async def asking(start: Any, engine: Any) -> AsyncIterator[Client]:
    client = Client((await start(engine)).url)
    yield client
    await client.close()


@pytest.fixture
async def chunks_of(start: Any, engine: Any) -> Any:
    """The choices of a chat answer's chunks, and the raw stream."""
    running = await start(engine)

    async def ask(text: str, sizes: Sequence[int], **fields: Any) -> list[Any]:
        engine.say(text, sizes)
        *events, done = await running.events("chat", **{"tools": CHAT_TOOLS, **fields})
        assert done == "[DONE]"
        return [choice for event in events for choice in event["choices"]]

    return ask


# ---------------------------------------------------------------- order


BEHIND = f"I look. {CALL}\nDone. {OTHER}\n\nBye."


@pytest.mark.quick_cover(1)
@pytest.mark.slow_cases("chat-sizes0", "responses-sizes0", "responses-sizes2", "responses-sizes3", "messages-*")
@pytest.mark.parametrize("sizes", [(1,), (3,), (7,), (40,), (1000,)])
@pytest.mark.parametrize("api", APIS)
async def test_text_behind_a_call_comes_behind_it(
    asking: Client, engine: Any, api: str, sizes: tuple[int, ...]
) -> None:
    engine.say(BEHIND, sizes)
    for stream in (False, True):
        answer = await asking.ask(api, stream=stream)
        calls = [("get_weather", ARGUMENTS), ("now", "{}")]
        texts = ["I look. ", "Done. ", "Bye."]
        if api == "chat":
            assert answer.items == ["".join(texts), *calls] and answer.reason == "tool_calls"
        else:
            assert answer.items == [texts[0], calls[0], texts[1], calls[1], texts[2]]
            assert answer.reason in ("completed", "tool_use")


async def test_the_end_of_a_call_and_text_behind_it_in_one_piece(chunks_of: Any) -> None:
    """The rest of the call comes before the text, each in its own chunk."""
    text = f"{CALL}\nDone."
    *_, rest, said = await chunks_of(text, (CALL.index(' "Paris"'), len(text)))
    assert rest["delta"] == {"tool_calls": [{"index": 0, "function": {"arguments": ARGUMENTS[8:]}}]}
    assert said["delta"] == {"content": "Done."}
    assert (rest["finish_reason"], said["finish_reason"]) == (None, "tool_calls")


@pytest.mark.parametrize("size", range(1, 60, 4))
async def test_a_chunk_has_one_part_of_one_call(chunks_of: Any, size: int) -> None:
    """Clients take a chunk's first entry of an index, or its last one, and lose the arguments of the others."""
    for text in (f"{CALL}\n{OTHER}\n{OTHER}", CALL):
        chunks = await chunks_of(text, (size,))
        parts = [part for chunk in chunks for part in chunk["delta"].get("tool_calls", [])]
        assert len(parts) == sum("tool_calls" in chunk["delta"] for chunk in chunks)
        assert all(len(chunk["delta"]) <= 1 for chunk in chunks[1:])
        assert "".join(part["function"]["arguments"] for part in parts if part["index"] == 0) == ARGUMENTS
        assert [part["index"] for part in parts] == sorted(part["index"] for part in parts)


# ---------------------------------------------------------------- chunks that say something


async def test_no_chunk_says_nothing(chunks_of: Any) -> None:
    first, *chunks, last = await chunks_of(f"Hm {CALL}", (1,))
    assert first["delta"] == {"role": "assistant", "content": ""}
    assert all(any(chunk["delta"].values()) for chunk in chunks)
    assert last["delta"] == {} and last["finish_reason"] == "tool_calls"


async def test_what_comes_beside_a_chunk_is_complete(chunks_of: Any) -> None:
    text = f"Hm {CALL}\n{OTHER} Bye"
    for sizes in ((1,), (9,), (1000,)):
        chunks = await chunks_of(text, sizes, logprobs=True, return_token_ids=True)
        tokens = [token for chunk in chunks for token in (chunk["logprobs"] or {"content": []})["content"]]
        assert "".join(token["token"] for token in tokens) == text + "<|im_end|>"
        ids = [token_id for chunk in chunks for token_id in chunk.get("token_ids", [])]
        assert bytes(ids[:-1]).decode() == text and len(ids) == len(text) + 1
    options = {"include_usage": True, "continuous_usage_stats": True}
    assert len(await chunks_of(text, (1,), stream_options=options, max_tokens=30)) >= 30


# ---------------------------------------------------------------- answers that are cut off


@pytest.mark.slow
@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("required", [False, True])
async def test_no_part_of_a_mark_is_text_wherever_an_answer_is_cut_off(
    asking: Client, engine: Any, api: str, required: bool
) -> None:
    text = CALL if required else f"Hm {CALL}\n{OTHER[:20]}"
    engine.say(text)
    asking.with_logprobs = False
    for max_tokens in range(1, len(text)):
        whole = await asking.ask(api, stream=False, max_tokens=max_tokens, required=required)
        streamed = await asking.ask(api, stream=True, max_tokens=max_tokens, required=required)
        assert whole.reason == streamed.reason and whole.reason in ("length", "incomplete", "max_tokens")
        assert whole.logprobs == streamed.logprobs
        said = "".join(item for item in whole.items if isinstance(item, str))
        assert said == "".join(item for item in streamed.items if isinstance(item, str))
        assert said == "" if required else said in ("H", "Hm", "Hm ")
        calls = [item for item in streamed.items if isinstance(item, tuple)]
        assert [name for name, _ in calls] == ["get_weather", "now"][: len(calls)]
        if api != "messages":  # its client repairs arguments that are cut off
            assert whole.items == streamed.items


@pytest.mark.slow_cases("chat")
@pytest.mark.parametrize("api", APIS)
async def test_what_only_looks_like_a_call_is_text_when_the_answer_ends_by_itself(
    asking: Client, engine: Any, api: str
) -> None:
    for text in ("1 <", "Use <tool_call", f"{OTHER}\nSo <tool"):
        engine.say(text, (2,))
        for stream in (False, True):
            items = (await asking.ask(api, stream=stream)).items
            assert "".join(item for item in items if isinstance(item, str)) == text.removeprefix(f"{OTHER}\n")


@pytest.mark.slow
async def test_a_complete_call_is_complete_wherever_the_next_one_is_cut_off(asking: Client, engine: Any) -> None:
    text = f"{OTHER}\n{CALL}"
    engine.say(text)
    for max_tokens in range(OTHER.index("{}") + 2, len(text), 4):
        for stream in (False, True):
            answer = await asking.ask("responses", stream=stream, max_tokens=max_tokens)
            first, *rest = answer.logprobs[1]
            assert first == "completed"
            whole = max_tokens >= text.rindex("}}") + 1
            assert rest == (["completed" if whole else "incomplete"] if len(answer.items) > 1 else [])


IN_MARKUP = ("days", "Paris", '"', "\n", "</tool_call>", "<", "get_weather", "}")


@pytest.mark.quick_cover(1)
@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("stream", [False, True])
async def test_calls_have_no_stop_strings(asking: Any, engine: Any, api: str, stream: bool) -> None:
    engine.say(f"{CALL}\n{OTHER}", (3,))
    whole = await asking.ask(api, stream=stream, required=True)
    assert whole.items == [("get_weather", ARGUMENTS), ("now", "{}")]
    assert await asking.ask(api, stream=stream, required=True, stops=IN_MARKUP) == whole
    assert await asking.ask(api, stream=stream, stops=IN_MARKUP) == whole
    for max_tokens in range(3, len(CALL), 9):  # as cut off by its length as without stop strings
        cut = await asking.ask(api, stream=stream, required=True, max_tokens=max_tokens)
        assert await asking.ask(api, stream=stream, required=True, max_tokens=max_tokens, stops=IN_MARKUP) == cut


@pytest.mark.quick_cover(2)
@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("stream", [False, True])
async def test_content_around_calls_has_stop_strings(asking: Any, engine: Any, api: str, stream: bool) -> None:
    asking.with_logprobs = False
    engine.say(f"I look at Rome. {CALL} Bern it was.", (3,))
    before = await asking.ask(api, stream=stream, stops=["Rome"])
    assert before.items == ["I look at "] and before.reason in ("stop", "completed", "stop_sequence")
    after = await asking.ask(api, stream=stream, stops=["Bern", "Paris"])
    assert ("get_weather", ARGUMENTS) in after.items
    assert "".join(item for item in after.items if isinstance(item, str)).rstrip() == "I look at Rome."


async def test_a_stop_string_after_a_call_is_the_reason(start: Any, tools: Any) -> None:
    text = f"{CALL} Done."
    running = await start(tools.Engine(text=text, eos_after=len(text)))
    choice = (await running.chat(tools=CHAT_TOOLS, stop="D")).json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("tool_calls", "D")
    assert choice["message"]["content"] is None and len(choice["message"]["tool_calls"]) == 1


async def test_json_that_shows_a_calls_mark_is_the_answer(start: Any, tools: Any) -> None:
    text = '{"a": "<tool_call>\\n <tool"}'
    running = await start(tools.Engine(text=text, eos_after=len(text), per_event=3))
    fields: dict[str, Any] = {"tools": CHAT_TOOLS, "response_format": {"type": "json_object"}}
    message = (await running.chat(**fields)).json()["choices"][0]["message"]
    assert message["content"] == text and "tool_calls" not in message
    events = await running.events("chat", **fields)
    assert "".join(event["choices"][0]["delta"].get("content") or "" for event in events[:-1]) == text


# ---------------------------------------------------------------- however it is divided


texts = st.text('a<>tol_c{}" \né🙂', max_size=10).filter(lambda text: "<tool_call>" not in text)
values = st.text('a"\\{}[]<>é🙂\n', max_size=5) | st.sampled_from(
    ["</tool_call>", "}\n</tool_call>", 1, None, [{"a": {}}]]
)
calls = st.tuples(
    st.sampled_from(NAMES), st.dictionaries(st.text("k<é", max_size=2), values, max_size=3).map(json.dumps)
)


def written(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.mark.slow
@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    answer=st.lists(st.tuples(texts, calls), max_size=3),
    last=texts,
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=9),
    cut=st.none() | st.integers(1, 200),
)
async def test_how_an_answer_is_divided_changes_nothing(
    asking: Client, engine: Any, answer: list[Any], last: str, sizes: list[int], cut: int | None
) -> None:
    text = "".join([before + written(*call) for before, call in answer]) + last
    expected = [part for before, call in answer for part in (before, call)] + [last]
    for i in range(2, len(expected), 2):
        expected[i] = expected[i].lstrip()
    expected = [*filter(None, expected)]
    for api in APIS:
        engine.say(text, [3000])
        once = await asking.ask(api, stream=False, max_tokens=cut or 3000)
        engine.say(text, sizes)
        whole = await asking.ask(api, stream=False, max_tokens=cut or 3000)
        streamed = await asking.ask(api, stream=True, max_tokens=cut or 3000)
        assert once == whole
        if api != "messages" or cut is None:
            assert streamed == whole
        if cut is None and api == "responses":
            assert whole.items == expected
            said = b"".join(bytes([byte]) for item in expected if isinstance(item, str) for byte in item.encode())
            assert len(whole.logprobs[0]) == len(said)
