"""Calls in each form through HTTP, with the marks as special tokens of the vocabulary, in all three APIs."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from msgspec.structs import replace

from common.model_files.files import ModelFiles
from common.model_files.template import ChatTemplate
from common.wire.sampling_params import ThinkingBudget
from router.text.calls.dialect import dialect_of
from router.text.calls.format import CallFormat
from router.text.text_pipeline import TextPipeline

from ..templates import HARMONY, LLAMA3, MISTRAL, PLAIN, TEMPLATES, template
from .test_streamed_calls import APIS, CHAT_TOOLS, Client

ARGUMENTS = '{"city": "Paris", "days": [1, 2]}'
WEATHER, NOW = ("get_weather", ARGUMENTS), ("now", "{}")
THOUGHT = "<|channel|>analysis<|message|>Hm, final.<|end|><|start|>assistant"
PLAIN_TEXT = ("pythonic", "xlam", "phi4-mini, functools", "command, fenced")
"""Formats whose calls begin without a special token."""
UNKNOWN = template("<call {{ f.name }}>{{ f.arguments | tojson }}</call>")
FORMS = {name: dialect_of(ChatTemplate(source)).format for name, source in TEMPLATES.items()}

Serve = Callable[..., Awaitable[Any]]


@pytest.fixture(scope="module")
def tokenizer_file(files: ModelFiles, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model's tokenizer with the marks of all forms as special tokens."""
    inner = tokenizers.Tokenizer.from_file(str(files.tokenizer))
    marks = sorted({mark for form in FORMS.values() for mark in form.marks})
    inner.add_special_tokens([tokenizers.AddedToken(mark, special=True) for mark in marks])
    path: Path = tmp_path_factory.mktemp("marked") / "tokenizer.json"
    inner.save(str(path))
    return path


@pytest.fixture(scope="module")
def pipelines(files: ModelFiles, tokenizer_file: Path) -> Iterator[Callable[[str], TextPipeline]]:
    made: dict[str, TextPipeline] = {}

    def of(template: str) -> TextPipeline:
        if template not in made:
            marked = replace(files, tokenizer=tokenizer_file, vocab_size=400, chat_template=template)
            made[template] = TextPipeline.from_files(marked, threads=2)
        return made[template]

    yield of
    for pipeline in made.values():
        pipeline.close()


@pytest.fixture
def serve(start: Any, pipelines: Callable[[str], TextPipeline], tools: Any) -> Serve:
    """Starts a router for a template, whose engine says a text."""

    async def run(template: str, said: str, per_event: int = 1, **settings: Any) -> Any:
        pipeline = pipelines(template)
        script = pipeline.tokenizer.encode(said, add_special_tokens=False)
        engine = tools.Engine(script=script, eos_after=len(script), per_event=per_event)
        return await start(engine, pipeline=pipeline, **settings)

    return run


def answer_of(form: CallFormat) -> str:
    if form.has_channels:
        remark = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
        return THOUGHT + remark + form.written([WEATHER]).removesuffix("<|call|>")
    return f"I look.\n{form.written([WEATHER, NOW])}"


async def asked(running: Any, api: str, **options: Any) -> Any:
    client = Client(running.url)
    client.with_logprobs = False
    try:
        return await client.ask(api, **options)
    finally:
        await client.close()


@pytest.mark.slow_except("hermes-1", "llama3-1000")
@pytest.mark.parametrize("per_event", [1, 1000])
@pytest.mark.parametrize("name", TEMPLATES)
async def test_calls(serve: Serve, name: str, per_event: int) -> None:
    form = FORMS[name]
    running = await serve(TEMPLATES[name], answer_of(form), per_event)
    calls = [WEATHER] if form.has_channels else [WEATHER, NOW]
    for api, stream in itertools.product(APIS, (False, True)):
        answer = await asked(running, api, stream=stream)
        assert [str(answer.items[0]).rstrip(), *answer.items[1:]] == ["I look.", *calls], api
        assert answer.reason == {"responses": "completed", "messages": "tool_use"}.get(api, "tool_calls")
        assert name in PLAIN_TEXT or "<[" in running.engine.requests[-1].params.grammar


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("said", "blocks"),
    [
        (
            "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>final<|message|>Hi",
            ["I look.Hi"],
        ),
        (f"<|channel|>final<|message|>Hi<|end|><|start|>assistant{THOUGHT}<|channel|>final<|message|>!", ["Hi!"]),
    ],
)
async def test_messages_in_a_row_are_one_block(serve: Serve, said: str, blocks: list[str], stream: bool) -> None:
    running = await serve(HARMONY, said)
    assert (await asked(running, "messages", stream=stream)).items == blocks


async def test_a_thought_that_ends_an_answer_has_an_empty_text_after_it(serve: Serve) -> None:
    thought = THOUGHT.removesuffix("<|start|>assistant")
    running = await serve(HARMONY, f"<|channel|>final<|message|>Hi<|end|><|start|>assistant{thought}")
    fields = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 900, "thinking": {"type": "adaptive"}}
    content = (await running.http.post("/v1/messages", json=fields)).json()["content"]
    assert [block["type"] for block in content] == ["text", "thinking", "text"] and content[2]["text"] == ""


@pytest.mark.slow_except("hermes", "llama3", "pythonic", "harmony", "glm", "granite", "gemma4", "deepseek-v3.2")
@pytest.mark.parametrize("name", TEMPLATES)
async def test_a_call_can_be_demanded(serve: Serve, name: str) -> None:
    form = FORMS[name]
    running = await serve(TEMPLATES[name], form.written([NOW]).removesuffix("<|call|>"))
    for choice in ("required", {"type": "function", "function": {"name": "now"}}):
        reply = await running.chat(tools=CHAT_TOOLS, tool_choice=choice)
        choice = reply.json()["choices"][0]
        (call,) = choice["message"]["tool_calls"]
        assert (call["function"]["name"], call["function"]["arguments"]) == NOW and call["id"].startswith("call_")
        assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None


@pytest.mark.slow_except("olmo3")
@pytest.mark.parametrize("name", TEMPLATES)
async def test_wherever_an_answer_is_cut_off(serve: Serve, name: str) -> None:
    running = await serve(TEMPLATES[name], answer_of(FORMS[name]))
    for max_tokens in range(1, running.engine.eos_after, 5):
        whole = await running.chat(tools=CHAT_TOOLS, max_tokens=max_tokens)
        events = await running.events("chat", tools=CHAT_TOOLS, max_tokens=max_tokens)
        choice = whole.json()["choices"][0]
        assert choice["finish_reason"] == "length"
        message = choice["message"]
        deltas = [event["choices"][0]["delta"] for event in events[:-1]]
        assert "I look.\n".startswith(message["content"] or "")
        assert (message["content"] or "") == "".join(delta.get("content") or "" for delta in deltas)
        calls = message.get("tool_calls", [])
        streamed = [part["function"] for delta in deltas for part in delta.get("tool_calls", [])]
        assert "".join(part["arguments"] for part in streamed) == "".join(c["function"]["arguments"] for c in calls)
        assert all((ARGUMENTS if i == 0 else "{}").startswith(c["function"]["arguments"]) for i, c in enumerate(calls))


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != "harmony"])
async def test_without_tools_marks_are_left_out_as_ever(serve: Serve, name: str) -> None:
    running = await serve(TEMPLATES[name], "Hi[TOOL_CALLS] there<|python_tag|>")
    message = (await running.chat()).json()["choices"][0]["message"]
    assert message["content"] == "Hi there"


async def test_results_of_calls_go_back_to_the_template(serve: Serve, pipelines: Callable[[str], TextPipeline]) -> None:
    running = await serve(MISTRAL, "ok")
    call = {"id": "call_123", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "Time?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_123", "content": "noon"},
    ]
    assert (await running.chat(messages=messages, tools=CHAT_TOOLS)).status_code == 200
    shown = pipelines(MISTRAL).tokenizer.decode(running.engine.requests[-1].prompt_token_ids, skip_special_tokens=False)
    assert '[TOOL_CALLS] [{"name": "now", "arguments": {}, "id": "' in shown and "[tool]noon" in shown


# ---------------------------------------------------------------- channels


FINAL = f"{THOUGHT}<|channel|>final<|message|>Hello, final!"


@pytest.mark.parametrize("per_event", [pytest.param(1, marks=pytest.mark.slow), 4, 1000])
async def test_channels_are_thought_and_answer(serve: Serve, per_event: int) -> None:
    running = await serve(HARMONY, FINAL, per_event)
    for tools in (None, CHAT_TOOLS):
        message = (await running.chat(tools=tools)).json()["choices"][0]["message"]
        assert (message["content"], message["reasoning_content"]) == ("Hello, final!", "Hm, final.")
        deltas = [event["choices"][0]["delta"] for event in (await running.events("chat", tools=tools))[:-1]]
        for name, text in (("content", "Hello, final!"), ("reasoning", "Hm, final.")):
            assert "".join(delta.get(name) or "" for delta in deltas) == text
    message = (await running.chat(include_reasoning=False)).json()["choices"][0]["message"]
    assert message["content"] == "Hello, final!" and "reasoning_content" not in message
    assert (await asked(running, "responses", stream=False)).items == ["Hello, final!"]
    fields = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 900, "thinking": {"type": "adaptive"}}
    blocks = (await running.http.post("/v1/messages", json=fields)).json()["content"]
    assert [(block["type"], block.get("thinking", block.get("text"))) for block in blocks] == [
        ("thinking", "Hm, final."),
        ("text", "Hello, final!"),
    ]


async def test_a_form_is_that_of_the_final_channel(serve: Serve, pipelines: Callable[[str], TextPipeline]) -> None:
    running = await serve(HARMONY, FINAL.replace("Hello, final!", '{"a": 1}'))
    fields = {"response_format": {"type": "json_object"}, "thinking_token_budget": 5}
    message = (await running.chat(**fields)).json()["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ('{"a": 1}', "Hm, final.")
    params, encode = running.engine.requests[-1].params, pipelines(HARMONY).tokenizer.encode
    start, end = (tuple(encode(mark)) for mark in ("<|channel|>analysis<|message|>", "<|end|>"))
    assert params.thinking == ThinkingBudget(5 + len(start), end, start) and "remark*" in params.grammar
    running = await serve(HARMONY, '{"a": 1}', reasoning_in_form=True)
    message = (await running.chat(response_format={"type": "json_object"})).json()["choices"][0]["message"]
    assert message["content"] == '{"a": 1}' and "remark" not in running.engine.requests[-1].params.grammar


async def test_with_reasoning_none_thoughts_are_text(serve: Serve) -> None:
    running = await serve(HARMONY, FINAL, reasoning="none")
    message = (await running.chat()).json()["choices"][0]["message"]
    assert message["content"] == "Hm, final.Hello, final!" and "reasoning_content" not in message


@pytest.mark.parametrize("per_event", [1, 1000])
async def test_stop_strings_are_not_looked_for_in_heads_and_thoughts(serve: Serve, per_event: int) -> None:
    running = await serve(HARMONY, FINAL, per_event)
    for stop, content in (("analysis", "Hello, final!"), ("<|", "Hello, final!"), ("assistant", "Hello, final!"),
                          ("!", "Hello, final"), (".<|end|>", "Hello, final!")):  # fmt: skip
        choice = (await running.chat(stop=[stop])).json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == (content, "stop"), stop
        assert choice["message"]["reasoning_content"] == "Hm, final."
        streamed = (await running.events("chat", stop=[stop]))[:-1]
        assert "".join(event["choices"][0]["delta"].get("content") or "" for event in streamed) == content
    both = (await running.chat(stop=["final"])).json()["choices"][0]["message"]
    assert (both["content"], both["reasoning_content"]) == ("Hello, ", "Hm, final.")


async def test_log_probabilities_belong_to_the_text(serve: Serve) -> None:
    remark = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    running = await serve(HARMONY, THOUGHT + remark + FINAL.removeprefix(THOUGHT), 1000)
    asked_for = {"input": "hi", "include": ["message.output_text.logprobs"]}
    body = (await running.http.post("/v1/responses", json=asked_for)).json()
    messages = [item for item in body["output"] if item["type"] == "message"]
    shown = [(part["text"], part["logprobs"]) for item in messages for part in item["content"]]
    for text, logprobs in shown:
        assert "".join(token["token"] for token in logprobs) == text
    assert "".join(text for text, _ in shown) == "I look.Hello, final!"


# ---------------------------------------------------------------- settings


async def test_a_parser_may_be_named(serve: Serve) -> None:
    running = await serve(PLAIN, "[now()]", tool_parser="pythonic")
    message = (await running.chat(tools=CHAT_TOOLS)).json()["choices"][0]["message"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["now"]


async def test_an_unknown_format_is_logged_with_the_model_and_the_option(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "router.generation.served_model")
    for source, parser in ((LLAMA3, "auto"), (UNKNOWN, "pythonic"), (PLAIN, "auto"), (UNKNOWN, "auto")):
        await serve(source, "hi", tool_parser=parser)
    known = [(each.levelname, each.getMessage()) for each in caplog.records if "tool-call format" in each.getMessage()]
    assert [level for level, _ in known] == ["INFO", "WARNING"], "a template without tools is no reason to worry"
    assert all(text.startswith("model tiny-random: ") and "--tool-parser" in text for _, text in known)


async def test_without_a_parser_calls_are_text_and_none_can_be_demanded(serve: Serve) -> None:
    text = '{"name": "now", "parameters": {}}'
    running = await serve(LLAMA3, text, tool_parser="none")
    message = (await running.chat(tools=CHAT_TOOLS)).json()["choices"][0]["message"]
    assert message["content"] == text and "tool_calls" not in message
    assert running.engine.requests[-1].params.grammar == ""
    for choice in ("required", {"type": "function", "function": {"name": "now"}}):
        reply = await running.chat(tools=CHAT_TOOLS, tool_choice=choice)
        assert reply.status_code == 400 and reply.json()["error"]["param"] == "tool_choice"
        assert "--tool-parser none" in reply.json()["error"]["message"]
    reply = await running.chat(tools=CHAT_TOOLS, response_format={"type": "json_object"})
    assert reply.status_code == 200 and running.engine.requests[-1].params.grammar


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        pytest.param("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, marks=pytest.mark.slow),
        pytest.param("/v1/responses", {"input": "hi"}, marks=pytest.mark.slow),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}),
    ],
)
async def test_an_empty_list_of_tools_is_none_at_all(running: Any, path: str, fields: dict[str, Any]) -> None:
    """OpenAI's chat API refused it for long; clients send it whatever the server, so it means what it says."""
    without = await running.http.post(path, json=fields | {"max_tokens": 9} if "input" not in fields else fields)
    for choice in ({}, {"tool_choice": {"type": "auto"} if "messages" in path else "auto"}):
        reply = await running.http.post(path, json=fields | {"tools": []} | choice)
        assert reply.status_code == 200, reply.text
        asked = running.engine.requests[-1]
        assert asked.prompt_token_ids == running.engine.requests[0].prompt_token_ids and not asked.params.grammar
    assert without.status_code == 200
    required = {"type": "any"} if "messages" in path else "required"
    reply = await running.http.post(path, json=fields | {"tools": [], "tool_choice": required})
    assert reply.status_code == 400 and "tool_choice" in reply.text
