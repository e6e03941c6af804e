"""Models that think before they answer: every API shows the thought in its own way."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anthropic
import pytest
from msgspec.structs import replace

from common.model_files.files import ModelFiles
from common.wire.sampling_params import ThinkingBudget
from router.text.text_pipeline import TextPipeline

from ..sdk import client_of

THOUGHT = "The user greets. I greet."
ANSWER = f"<think>\n{THOUGHT}\n</think>\n\nHello!"
CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
HI = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "now"}}]
TEMPLATE = """{% if reasoning_effort %}Effort: {{ reasoning_effort }}
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if opened %}<think>
{% endif %}{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""


@pytest.fixture(scope="module")
def files(files: ModelFiles) -> ModelFiles:
    return replace(files, chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def text(files: ModelFiles) -> Iterator[TextPipeline]:
    pipeline = TextPipeline.from_files(files, threads=2)
    yield pipeline
    pipeline.close()


def continued(text: str) -> dict[str, Any]:
    return {"messages": [*HI, {"role": "assistant", "content": text}], "continue_final_message": True}


def reasoning(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


async def answering(start: Any, tools: Any, text: str, per_event: int = 4, **settings: Any) -> Any:
    return await start(tools.Engine(text=text, eos_after=len(text), per_event=per_event), **settings)


@pytest.fixture
async def thinking(start: Any, tools: Any) -> AsyncIterator[Any]:
    yield await answering(start, tools, ANSWER)


async def test_a_thought_is_apart_from_the_answer(thinking: Any) -> None:
    choice = (await thinking.chat(max_tokens=900)).json()["choices"][0]
    assert (choice["message"]["content"], choice["message"]["reasoning_content"]) == ("Hello!", THOUGHT)
    assert choice["message"]["reasoning"] == THOUGHT and choice["finish_reason"] == "stop"


@pytest.mark.parametrize("per_event", [1, 7, 1000])
async def test_streamed(start: Any, tools: Any, per_event: int) -> None:
    running = await answering(start, tools, ANSWER, per_event)
    *events, _ = await running.events("chat", max_tokens=900)
    deltas = [event["choices"][0]["delta"] for event in events]
    for name in ("reasoning_content", "reasoning"):
        assert "".join(delta.get(name) or "" for delta in deltas) == THOUGHT
    assert "".join(delta.get("content") or "" for delta in deltas) == "Hello!"
    assert "think" not in json.dumps(events)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"messages": HI, "reasoning_effort": "high"}),
        ("/v1/chat/completions", {"messages": HI, "chat_template_kwargs": {"reasoning_effort": "high"}}),
        ("/v1/responses", {"input": "hi", "reasoning": {"effort": "high"}}),
        ("/v1/messages", {"messages": HI, "max_tokens": 9, "output_config": {"effort": "high"}}),
    ],
)
async def test_the_template_gets_the_effort(
    thinking: Any, text: TextPipeline, path: str, fields: dict[str, Any]
) -> None:
    assert (await thinking.http.post(path, json=fields)).status_code == 200
    prompt = text.tokenizer.decode(thinking.engine.requests[0].prompt_token_ids)
    assert prompt.startswith("Effort: high\n")


async def test_no_effort_at_all_is_no_thought(thinking: Any, text: TextPipeline) -> None:
    for fields in ({"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}, {}):
        await thinking.chat(**fields)
    ends = [text.tokenizer.decode(request.prompt_token_ids)[-12:] for request in thinking.engine.requests]
    assert ["</think>" in end for end in ends] == [True, True, False]


@pytest.mark.parametrize(
    ("effort", "shown"), [("high", "True,True,enabled"), ("none", "False,False,disabled"), (None, ",,")]
)
async def test_the_template_gets_the_switches_of_all_families(
    start: Any, tools: Any, files: ModelFiles, effort: str | None, shown: str
) -> None:
    template = "{{ enable_thinking }},{{ thinking }},{{ thinking_mode }}"
    pipeline = TextPipeline.from_files(replace(files, chat_template=template), threads=1)
    running = await start(tools.Engine(), pipeline=pipeline)
    await running.chat(reasoning_effort=effort)
    assert bytes(list(running.engine.requests[-1].prompt_token_ids)).decode() == shown
    pipeline.close()


async def test_a_template_that_opens_the_thought(start: Any, tools: Any) -> None:
    running = await answering(start, tools, ANSWER.removeprefix("<think>\n"))
    message = (await running.chat(max_tokens=900, chat_template_kwargs={"opened": True})).json()["choices"][0][
        "message"
    ]
    assert (message["content"], message["reasoning_content"]) == ("Hello!", THOUGHT)


async def test_a_thought_that_is_cut_off_is_no_answer(thinking: Any) -> None:
    choice = (await thinking.chat(max_tokens=20)).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")
    assert THOUGHT.startswith(choice["message"]["reasoning_content"])


async def test_an_answer_without_a_thought_is_as_ever(start: Any, tools: Any) -> None:
    running = await answering(start, tools, "Hello <think>!")
    message = (await running.chat(max_tokens=900)).json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "Hello <think>!", "refusal": None}


async def test_it_may_be_left_out_or_left_in(start: Any, tools: Any, thinking: Any) -> None:
    message = (await thinking.chat(max_tokens=900, include_reasoning=False)).json()["choices"][0]["message"]
    assert message["content"] == "Hello!" and "reasoning_content" not in message
    plain = await answering(start, tools, ANSWER, reasoning="none")
    assert (await plain.chat(max_tokens=900)).json()["choices"][0]["message"]["content"] == ANSWER


async def test_calls_follow_a_thought(start: Any, tools: Any) -> None:
    running = await answering(start, tools, f"<think>hm</think>\n{CALL}")
    choice = (await running.chat(max_tokens=900, tools=TOOLS)).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["reasoning_content"] == "hm"
    assert choice["message"]["content"] is None and len(choice["message"]["tool_calls"]) == 1


FORMS: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_object"}}, '{"a": 1}'),
    ({"structured_outputs": {"regex": " a+"}}, " aa"),
    ({"tools": TOOLS, "tool_choice": "required"}, CALL),
]


@pytest.mark.parametrize(("form", "written"), FORMS)
async def test_a_form_begins_with_the_first_token_on_request(
    start: Any, tools: Any, form: dict[str, Any], written: str
) -> None:
    """With a template that opens a thought, the whole answer would otherwise be the thought."""
    running = await answering(start, tools, written, reasoning_in_form=True)
    reply = await running.chat(max_tokens=900, chat_template_kwargs={"opened": True}, **form)
    message = reply.json()["choices"][0]["message"]
    assert "reasoning_content" not in message and (message["content"] == written or message["tool_calls"])
    assert "closing" not in running.engine.requests[-1].params.grammar


async def test_a_budget_does_not_end_a_thought_within_a_form(start: Any, tools: Any) -> None:
    running = await answering(start, tools, '{"a": 1}', reasoning_in_form=True)
    fields = {"max_tokens": 900, "thinking_token_budget": 3}
    opened = {"chat_template_kwargs": {"opened": True}}
    await running.chat(**fields, **opened, response_format={"type": "json_object"})
    await running.completion(**fields, prompt="<think>", response_format={"type": "json_object"})
    await running.chat(**fields, **opened)
    budgets = [request.params.thinking for request in running.engine.requests]
    assert budgets == [None, None, ThinkingBudget(3, (*b"</think>",))]


@pytest.mark.parametrize("per_event", [pytest.param(1, marks=pytest.mark.slow), 1000])
@pytest.mark.parametrize(("form", "written"), FORMS)
async def test_a_form_follows_the_thought(
    start: Any, tools: Any, form: dict[str, Any], written: str, per_event: int
) -> None:
    gap = "\n\n" if "structured_outputs" not in form else ""
    prompts = {
        "opened": ({"chat_template_kwargs": {"opened": True}}, f"{THOUGHT}</think>{gap}{written}"),
        "by the model": ({}, f"<think>{THOUGHT}</think>{gap}{written}"),
        "continued": (continued("<think>The user"), f"{THOUGHT}</think>{gap}{written}"),
        "closed": ({"reasoning_effort": "none"}, written),
        "none": ({}, written),
    }
    for name, (fields, said) in prompts.items():
        running = await answering(start, tools, said, per_event)
        fields = {"max_tokens": 900} | fields | form
        body = (await running.chat(**fields)).json()
        message, thinks = body["choices"][0]["message"], name not in ("closed", "none")
        assert message.get("reasoning_content") == (THOUGHT if thinks else None), name
        assert message["tool_calls"] if "tools" in form else message["content"] == written, name
        counted = len(said.partition("</think>")[0]) + len("</think>") if thinks else 0
        assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == counted
        deltas = [event["choices"][0]["delta"] for event in (await running.events("chat", **fields))[:-1]]
        for key in ("content", "reasoning_content"):
            assert "".join(delta.get(key) or "" for delta in deltas) == (message.get(key) or "")
        grammar = running.engine.requests[-1].params.grammar
        assert ("prelude?" in grammar, "closing" in grammar) == {
            "by the model": (True, True), "none": (True, True), "closed": (False, False)
        }.get(name, (False, True)), name  # fmt: skip


async def test_a_form_follows_the_thought_in_all_apis(start: Any, tools: Any) -> None:
    running = await answering(start, tools, f'<think>{THOUGHT}</think>\n\n{{"a": 1}}')
    schema = {"type": "object"}
    form = {"type": "json_schema", "name": "x", "schema": schema}
    response = (await running.http.post("/v1/responses", json={"input": "hi", "text": {"format": form}})).json()
    shown = [(item["type"], item["content"][0]["text"]) for item in response["output"]]
    assert shown == [("reasoning", THOUGHT), ("message", '{"a": 1}')]
    counted = len(f"<think>{THOUGHT}</think>")
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == counted
    fields = {"messages": HI, "max_tokens": 900, "thinking": {"type": "adaptive"}}
    fields["output_config"] = {"format": {"type": "json_schema", "schema": schema}}
    blocks = (await running.http.post("/v1/messages", json=fields)).json()["content"]
    assert [block.get("thinking") or block["text"] for block in blocks] == [THOUGHT, '{"a": 1}']
    assert all("prelude?" in request.params.grammar for request in running.engine.requests)


async def test_marks_may_be_configured(start: Any, tools: Any) -> None:
    text = f"<|think|>{THOUGHT}<|/think|>Hello!"
    running = await answering(start, tools, text, reasoning_start="<|think|>", reasoning_end="<|/think|>")
    message = (await running.chat(max_tokens=900, thinking_token_budget=40)).json()["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("Hello!", THOUGHT)
    assert running.engine.requests[-1].params.thinking == ThinkingBudget(49, (*b"<|/think|>",), (*b"<|think|>",))


@pytest.mark.parametrize("per_event", [1, pytest.param(1000, marks=pytest.mark.slow)])
async def test_clients_do_not_see_what_surrounds_an_answer(
    start: Any, tools: Any, files: ModelFiles, per_event: int
) -> None:
    source = TEMPLATE + "{# thinking: <response></response> #}"
    pipeline = TextPipeline.from_files(replace(files, chat_template=source), threads=1)
    thought, json_form = f"<think>{THOUGHT}</think>\n\n", {"response_format": {"type": "json_object"}}
    cases: list[tuple[str, dict[str, Any], str | None]] = [
        ("<response>\nHello </response>!\n</response>\n", {}, "Hello </response>!"),
        ("<response>\nHello there!\n</response>\n", {"stop": ["the", "</response>"]}, "Hello "),
        ('<response>\n{"a": 1}', json_form, '{"a": 1}'),
        (f"<response>\n{CALL}\n</response>", {"tools": TOOLS, "tool_choice": "required"}, None),
        (f"<response>\nI look.\n{CALL}\n</response>", {"tools": TOOLS}, "I look.\n"),
    ]
    for written, fields, content in cases:
        engine = tools.Engine(text=thought + written, eos_after=len(thought + written), per_event=per_event)
        running = await start(engine, pipeline=pipeline)
        body = (await running.chat(max_tokens=900, **fields)).json()
        message = body["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == (THOUGHT, content), written
        assert len(message.get("tool_calls") or ()) == ("tools" in fields)
        events = (await running.events("chat", max_tokens=900, **fields))[:-1]
        deltas = [event["choices"][0]["delta"] for event in events]
        assert "".join(delta.get("content") or "" for delta in deltas) == (content or "")
        if json_form is fields:
            assert "<response>" in engine.requests[-1].params.grammar
    written = '<response>\n{"a": 1}'
    running = await start(tools.Engine(text=written, eos_after=len(written), per_event=per_event), pipeline=pipeline)
    closed = (await running.chat(max_tokens=900, reasoning_effort="none", **json_form)).json()["choices"][0]["message"]
    assert closed["content"] == '{"a": 1}' and "<response>" in running.engine.requests[-1].params.grammar
    asked = {"input": "hi", "include": ["message.output_text.logprobs"], "stream": False}
    running = await start(tools.Engine(text=thought + cases[0][0], per_event=per_event), pipeline=pipeline)
    asked["max_output_tokens"] = len(thought + cases[0][0])
    part = (await running.http.post("/v1/responses", json=asked)).json()["output"][-1]["content"][0]
    assert part["text"] == "".join(token["token"] for token in part["logprobs"]) == "Hello </response>!"
    pipeline.close()


async def test_marks_are_those_of_the_template_of_the_request(start: Any, tools: Any, files: ModelFiles) -> None:
    """A separate template for tools may be the only one with marks, or have other ones."""
    plain = TEMPLATE.replace("<think>", "[THINK]").replace("</think>", "[/THINK]")
    with_tools = TEMPLATE.replace("<|im_end|>", "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}"
                                  "</tool_call>{% endfor %}<|im_end|>") + "{{ tools | tojson }}"  # fmt: skip
    no_marks = "{% for m in messages %}{{ m.content }}{% endfor %}"
    for template, answer in ((plain, f"[THINK]{THOUGHT}[/THINK]Hello!"), (no_marks, ANSWER)):
        pipeline = TextPipeline.from_files(replace(files, chat_template=template, tool_template=with_tools), threads=1)
        end = "</think>" if "</think>" in answer else "[/THINK]"
        for fields, said, closing in (({"tools": TOOLS}, ANSWER, "</think>"), ({}, answer, end)):
            engine = tools.Engine(text=said, eos_after=len(said))
            running = await start(engine, pipeline=pipeline)
            body = (await running.chat(max_tokens=900, thinking_token_budget=99, **fields)).json()
            message = body["choices"][0]["message"]
            assert (message["content"], message["reasoning_content"]) == ("Hello!", THOUGHT)
            assert bytes(engine.requests[-1].params.thinking.end).decode() == closing
        pipeline.close()


async def test_thoughts_of_earlier_answers_reach_the_template(thinking: Any) -> None:
    for names in (("reasoning_content",), ("reasoning",), ("reasoning_content", "reasoning")):
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", **dict.fromkeys(names, "c")}]
        await thinking.chat(messages=[*turns, {"role": "user", "content": "d"}])
        prompt = bytes(token for token in thinking.engine.requests[-1].prompt_token_ids if token < 256).decode()
        assert "<think>c</think>b" in prompt


@pytest.mark.parametrize("api", ["messages", "responses"])
async def test_thoughts_that_agents_send_back_reach_the_template(thinking: Any, api: str) -> None:
    """As blocks or items, before the call or the text that followed them."""
    if api == "messages":
        turns = [
            [{"type": "thinking", "thinking": "c", "signature": ""}, {"type": "tool_use", "id": "1", "name": "now"}],
            [{"type": "tool_result", "tool_use_id": "1", "content": "d"}],
            [
                {"type": "redacted_thinking", "data": "x"},
                {"type": "thinking", "thinking": "e"},
                {"type": "thinking", "thinking": "f"},
                {"type": "text", "text": "g"},
            ],
            [{"type": "thinking", "thinking": "h"}, {"type": "text", "text": "i"}],  # not the model's thought
        ]
        roles = ("assistant", "user", "assistant", "user")
        messages = [{"role": role, "content": blocks} for role, blocks in zip(roles, turns, strict=True)]
        fields: dict[str, Any] = {"messages": [*HI, *messages], "max_tokens": 900}
    else:
        items: list[dict[str, Any]] = [
            reasoning("c"),
            {"type": "function_call", "call_id": "1", "name": "now", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "d"},
            *(reasoning("e"), reasoning("f")),
            {"role": "assistant", "content": "g"},
            reasoning("h"),  # followed by no answer
            {"role": "user", "content": "i"},
        ]
        fields = {"input": [*HI, *items]}
    assert (await thinking.http.post(f"/v1/{api}", json=fields)).status_code == 200
    prompt = bytes(token for token in thinking.engine.requests[-1].prompt_token_ids if token < 256).decode()
    first, called, result, told, last = re.findall(r"(\w+)\n(.*?)\n(?=user|assistant|tool|$)", prompt, re.DOTALL)[:5]
    assert called[1].startswith("<think>c</think>") and '"now"' in called[1]
    assert told == ("assistant", "<think>e\nf</think>g") and (first[1], last[1]) == ("hi", "i")


async def test_completions_are_raw(thinking: Any) -> None:
    assert (await thinking.completion(prompt="hi", max_tokens=900)).json()["choices"][0]["text"] == ANSWER


@pytest.mark.parametrize("wanted", [None, {"type": "disabled"}, {"type": "enabled", "budget_tokens": 1024}])
async def test_anthropics_clients_get_blocks_of_thinking_if_they_want_them(thinking: Any, wanted: Any) -> None:
    asked: Any = {"model": "tiny-random", "max_tokens": 900, "messages": [{"role": "user", "content": "hi"}]}
    if wanted is not None:
        asked["thinking"] = wanted
    shows = wanted is not None and wanted["type"] == "enabled"
    async with anthropic.AsyncAnthropic(base_url=thinking.url, api_key="none", max_retries=0) as sdk:
        whole = await sdk.messages.create(**asked)
        async with sdk.messages.stream(**asked) as stream:
            streamed = await stream.get_final_message()
    for message in (whole, streamed):
        assert [block.type for block in message.content] == (["thinking"] if shows else []) + ["text"]
        assert message.content[-1].text == "Hello!"  # type: ignore[union-attr]
        if shows:
            assert message.content[0].thinking == THOUGHT  # type: ignore[union-attr]
            assert message.content[0].signature  # type: ignore[union-attr]  # clients drop blocks without one
    prompt = bytes(token for token in thinking.engine.requests[0].prompt_token_ids if token < 256).decode()
    assert prompt.endswith("<think>\n\n</think>\n\n") is not shows  # the template gets the setting


async def test_a_thought_alone_has_an_empty_text_behind_it(thinking: Any) -> None:
    asked: Any = {"model": "tiny-random", "max_tokens": 20, "messages": [{"role": "user", "content": "hi"}]}
    asked["thinking"] = {"type": "adaptive"}
    async with anthropic.AsyncAnthropic(base_url=thinking.url, api_key="none", max_retries=0) as sdk:
        whole = await sdk.messages.create(**asked)
        async with sdk.messages.stream(**asked) as stream:
            streamed = await stream.get_final_message()
    for message in (whole, streamed):
        assert [block.type for block in message.content] == ["thinking", "text"]
        assert message.content[1].text == "" and message.stop_reason == "max_tokens"  # type: ignore[union-attr]


@pytest.mark.slow
async def test_a_thought_is_an_item_of_a_response(thinking: Any) -> None:
    async with client_of(thinking) as sdk:
        response = await sdk.responses.create(model="tiny-random", input="hi")
        async with sdk.responses.stream(model="tiny-random", input="hi") as stream:
            events = [event async for event in stream]
            streamed = await stream.get_final_response()
    for one in (response, streamed):
        thought, message = one.output
        assert (thought.type, message.type) == ("reasoning", "message") and one.output_text == "Hello!"
        assert thought.id.startswith("rs_") and thought.summary == [] and thought.status == "completed"  # type: ignore[union-attr]
        assert [part.text for part in thought.content or ()] == [THOUGHT]  # type: ignore[union-attr]
    deltas = [event for event in events if event.type == "response.reasoning_text.delta"]
    (done,) = [event for event in events if event.type == "response.reasoning_text.done"]
    assert "".join(event.delta for event in deltas) == done.text == THOUGHT and len(deltas) > 1
    assert {event.item_id for event in (*deltas, done)} == {streamed.output[0].id}
    assert [event.sequence_number for event in events] == list(range(len(events)))


@pytest.mark.parametrize("num_tokens", [pytest.param(20, marks=pytest.mark.slow), 900])
async def test_a_thought_alone_is_a_response(start: Any, tools: Any, num_tokens: int) -> None:
    """One that is cut off in its thought has no message; one that ends by itself has an empty one."""
    running = await answering(start, tools, f"<think>{THOUGHT}</think>")
    asked: Any = {"model": "tiny-random", "input": "hi", "max_output_tokens": num_tokens}
    async with client_of(running) as sdk:
        whole = await sdk.responses.create(**asked)
        streamed = [event async for event in await sdk.responses.create(**asked, stream=True)][-1].response  # type: ignore[union-attr]
    for response in (whole, streamed):
        statuses = [(item.type, item.status) for item in response.output]  # type: ignore[union-attr]
        if num_tokens == 20:
            assert (response.status, statuses) == ("incomplete", [("reasoning", "incomplete")])
        else:
            assert (response.status, statuses) == ("completed", [("reasoning", "completed"), ("message", "completed")])


THOUGHT_TOKENS = ANSWER.index("</think>") + len("</think>")  # the tiny tokenizer has a token for each byte


@pytest.mark.quick_cover(1)
@pytest.mark.parametrize("per_event", [1, 7, 1000])
@pytest.mark.parametrize(
    ("answer", "limit", "counted"),
    [
        (ANSWER, 900, THOUGHT_TOKENS),
        (ANSWER, THOUGHT_TOKENS, THOUGHT_TOKENS),
        (ANSWER, 12, 12),
        ("<think></think>x", 900, len("<think></think>")),
        ("Hello.", 900, 0),
        ("Hello </think>.", 900, 0),
    ],
)
async def test_usage_counts_the_tokens_of_a_thought(
    start: Any, tools: Any, per_event: int, answer: str, limit: int, counted: int
) -> None:
    running = await answering(start, tools, answer, per_event)
    asked: Any = {"model": "tiny-random", "messages": HI, "max_tokens": limit, "n": 2}
    async with client_of(running) as sdk:
        whole = await sdk.chat.completions.create(**asked)
        stream = await sdk.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        streamed = [chunk async for chunk in stream][-1]  # type: ignore[union-attr]
        response = await sdk.responses.create(model="tiny-random", input="hi", max_output_tokens=limit)
    for usage in (whole.usage, streamed.usage):
        assert usage.completion_tokens_details.reasoning_tokens == 2 * counted  # type: ignore[union-attr]
    assert response.usage.output_tokens_details.reasoning_tokens == counted


async def test_thoughts_that_stay_in_the_text_are_not_counted(start: Any, tools: Any) -> None:
    plain = await answering(start, tools, ANSWER, reasoning="none")
    usage = (await plain.chat(max_tokens=900)).json()["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 0}


@pytest.mark.parametrize("per_event", [1, 1000])
async def test_a_thought_that_a_message_leaves_open_is_continued(start: Any, tools: Any, per_event: int) -> None:
    """White space at the beginning of the answer belongs to the thought."""
    running = await answering(start, tools, " greets.</think>Hello!", per_event)
    fields = continued("<think>The user says hi, or perhaps the user") | {"max_tokens": 900}
    body = (await running.chat(**fields)).json()
    message = body["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (" greets.", "Hello!")
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == len(" greets.</think>")
    deltas = [event["choices"][0]["delta"] for event in (await running.events("chat", **fields))[:-1]]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == " greets."
    assert "".join(delta.get("content") or "" for delta in deltas) == "Hello!"
    reply = await running.http.post("/v1/messages", json={"max_tokens": 900, "thinking": {"type": "adaptive"}} | fields)
    blocks = [(block["type"], block.get("thinking") or block.get("text")) for block in reply.json()["content"]]
    assert blocks == [("thinking", " greets."), ("text", "Hello!")]


@pytest.mark.parametrize(
    ("message", "answer", "expected"),
    [
        ("<think>a</think>So", " it is.", ("", " it is.")),
        ("So", " it is.", ("", " it is.")),
        ("So", "<think>a</think>it is.", ("a", "it is.")),
        ("Of <think>", "\na</think>b", ("a", "b")),
    ],
)
async def test_a_continued_message_without_an_open_thought(
    start: Any, tools: Any, message: str, answer: str, expected: tuple[str, str]
) -> None:
    running = await answering(start, tools, answer)
    got = (await running.chat(**continued(message), max_tokens=900)).json()["choices"][0]["message"]
    assert (got.get("reasoning_content", ""), got["content"]) == expected


async def test_an_echo_shows_the_continued_thought_as_a_thought(start: Any, tools: Any) -> None:
    running = await answering(start, tools, " greets.</think>Hello!")
    fields = continued("Well. <think>The user") | {"max_tokens": 900, "echo": True}
    message = (await running.chat(**fields)).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("The user greets.", "Well. Hello!")
    deltas = [event["choices"][0]["delta"] for event in (await running.events("chat", **fields))[:-1]]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "The user greets."
    assert "".join(delta.get("content") or "" for delta in deltas) == "Well. Hello!"


@pytest.mark.parametrize(
    "per_event", [pytest.param(1, marks=pytest.mark.slow), pytest.param(7, marks=pytest.mark.slow), 1000]
)
async def test_log_probabilities_of_a_response_are_those_of_its_text(start: Any, tools: Any, per_event: int) -> None:
    running = await answering(start, tools, f"<think>hm</think>\n\nHello. {CALL}\nBye.", per_event)
    asked: Any = {"model": "tiny-random", "input": "hi", "include": ["message.output_text.logprobs"]}
    asked["tools"] = [{"type": "function", "name": "now", "parameters": None, "strict": None}]
    async with client_of(running) as sdk:
        whole = await sdk.responses.create(**asked)
        async with sdk.responses.stream(**asked) as stream:
            streamed = await stream.get_final_response()
    for response in (whole, streamed):
        messages = [item for item in response.output if item.type == "message"]
        shown = [(part.text, "".join(token.token for token in part.logprobs)) for m in messages for part in m.content]  # type: ignore[union-attr]
        assert shown == [("Hello. ", "Hello. "), ("Bye.", "Bye.")]


@pytest.mark.parametrize("num_tokens", range(1, 40))
async def test_no_part_of_a_mark_is_shown_wherever_an_answer_is_cut_off(
    start: Any, tools: Any, num_tokens: int
) -> None:
    running = await answering(start, tools, f"<think>hm</think>\n{CALL}")
    fields = {"max_tokens": num_tokens, "tools": TOOLS}
    message = (await running.chat(**fields)).json()["choices"][0]["message"]
    deltas = [event["choices"][0]["delta"] for event in (await running.events("chat", **fields))[:-1]]
    for name in ("content", "reasoning_content"):
        assert (message.get(name) or "") == "".join(delta.get(name) or "" for delta in deltas)
        assert (message.get(name) or "") in ("", "h", "hm") and "hm" not in (message["content"] or "")


async def test_a_budget_of_the_thought_reaches_the_workers(thinking: Any) -> None:
    mark = (*b"</think>",)
    assert (await thinking.chat(max_tokens=5, thinking_token_budget=20)).status_code == 200
    assert thinking.engine.requests[-1].params.thinking == ThinkingBudget(20 + 7, mark, (*b"<think>",))
    fields = {"chat_template_kwargs": {"opened": True}}
    assert (await thinking.chat(max_tokens=5, thinking_token_budget=20, **fields)).status_code == 200
    assert thinking.engine.requests[-1].params.thinking == ThinkingBudget(20, mark)
    assert (await thinking.chat(max_tokens=5, thinking_token_budget=-1)).status_code == 200
    assert thinking.engine.requests[-1].params.thinking is None


@pytest.mark.parametrize(
    ("message", "left"), [("<think>The user", 12), ("a</think><think>The user", 12), ("<think>" + "x" * 40, 0)]
)
async def test_the_budget_counts_what_the_prompt_has_of_the_thought(thinking: Any, message: str, left: int) -> None:
    assert (await thinking.chat(**continued(message), max_tokens=5, thinking_token_budget=20)).status_code == 200
    assert thinking.engine.requests[-1].params.thinking == ThinkingBudget(left, (*b"</think>",))


async def test_the_budget_of_a_continued_answer_without_an_open_thought(thinking: Any) -> None:
    fields = continued("<think>a</think>So")
    assert (await thinking.chat(**fields, max_tokens=5, thinking_token_budget=20)).status_code == 200
    assert thinking.engine.requests[-1].params.thinking == ThinkingBudget(27, (*b"</think>",), (*b"<think>",))
