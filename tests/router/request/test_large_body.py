"""Large bodies are read like small ones, and delay no other request."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from typing import Any

import pytest
from pydantic import BaseModel

from common.errors import InvalidRequest, RequestError
from router.api.anthropic.fields import Block, CountTokensRequest, MessagesRequest
from router.api.responses.fields import Item, Part, ResponsesRequest
from router.request import body as request_body
from router.request.body import LARGE_BYTES, MAX_FIELD_BYTES, parse, parse_large
from router.request.fields import MAX_PARTS, ChatRequest, CompletionRequest, ContentPart, DetokenizeRequest, Message
from router.text.text_threads import HUGE_TEXT

MAX_LEN = 100_000
MAX_IDS = 300_000
PADDING = "x" * LARGE_BYTES
PART = {"type": "text", "text": "hi"}


def chat(content: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], **more}


def outcome(parsed: Any) -> Any:
    """The parsed model, or the error message."""
    try:
        return parsed()
    except InvalidRequest as error:
        return type(error), error.message, error.param, error.code


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (CompletionRequest, {"prompt": PADDING, "max_tokens": 3, "unknown": 1, "n": None}),
        (CompletionRequest, {"prompt": ["é", PADDING, ""], "stop": ["a"]}),
        (CompletionRequest, {"prompt": list(range(70_000))}),
        (CompletionRequest, {"prompt": [list(range(50_000))] * 3}),
        (CompletionRequest, {"prompt": [PADDING, 1]}),
        (CompletionRequest, {"prompt": [*range(70_000), -1]}),
        (CompletionRequest, {"prompt": [*range(70_000), "x"]}),
        (CompletionRequest, {"prompt": [[1], [*range(70_000), 2.5]]}),
        (CompletionRequest, {"prompt": PADDING, "temperature": "hot"}),
        (CompletionRequest, {"prompt": PADDING, "logit_bias": {str(i): 1 for i in range(9000)}}),
        (CompletionRequest, {"prompt": []}),
        (CompletionRequest, {"temperature": 1}),
        (ChatRequest, chat(PADDING, temperature=0.5)),
        (ChatRequest, {"messages": [{"role": "user", "content": PADDING}] * 3}),
        (ChatRequest, {"messages": [{"role": "user", "content": [PART, {"type": "text", "text": PADDING}]}]}),
        (ChatRequest, {"messages": [{"role": "user", "content": PADDING}, {"role": "nobody"}]}),
        (ChatRequest, chat([PART] * (MAX_PARTS + 1))),
        (ChatRequest, chat(PADDING, chat_template_kwargs={"documents": ["a" * 1000] * 300})),
        (ChatRequest, {"messages": PADDING}),
        (DetokenizeRequest, {"tokens": list(range(200_000))}),
    ],
)
def test_a_large_body_means_what_a_small_one_means(model: type[BaseModel], body: dict[str, Any]) -> None:
    for data in (json.dumps(body).encode(), json.dumps(body, indent=1, ensure_ascii=False).encode()):
        assert outcome(lambda data=data: parse_large(data, model, MAX_LEN, MAX_IDS)) == outcome(
            lambda data=data: parse(data, model)
        )


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"[" + b"1," * 200_000 + b"1]", "The body must be a JSON object"),
        (b'{"prompt": "' + b"a" * 300_000, "The body is not valid JSON"),
        (b'{"prompt": "' + b"a" * 300_000 + b'"} more', "The body is not valid JSON"),
        (b'{"prompt": "\xff' + b"a" * 300_000 + b'"}', "The body is not valid JSON"),
        (b'{"prompt": ["\xff", "' + b"a" * 300_000 + b'"]}', "The body is not valid JSON"),
        (b'{"x": ' + b"[" * 300_000 + b"]" * 300_000 + b"}", "The body is not valid JSON"),
    ],
)
def test_what_is_no_json_object(data: bytes, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        parse_large(data, CompletionRequest, MAX_LEN, MAX_IDS)


@pytest.mark.parametrize(
    ("prompt", "param"),
    [([1] * MAX_LEN, "prompt"), ([[1], [1] * MAX_LEN, [2]], "prompt[1]"), ([[1] * MAX_LEN], "prompt[0]")],
)
def test_token_ids_that_do_not_fit_are_counted_and_not_made(prompt: Any, param: str) -> None:
    data = json.dumps({"prompt": prompt}).encode()
    with pytest.raises(RequestError, match="length is 100000 tokens.*100000 in the prompt") as caught:
        parse_large(data, CompletionRequest, MAX_LEN, MAX_IDS)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", param)


def test_a_field_beside_the_prompt_has_a_bound() -> None:
    data = json.dumps(chat("hi", chat_template_kwargs={"x": "a" * MAX_FIELD_BYTES})).encode()
    with pytest.raises(InvalidRequest, match="chat_template_kwargs: must have at most 1,048,576 bytes"):
        parse_large(data, ChatRequest, MAX_LEN, MAX_IDS)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", chat([PART] * 2000)),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}] * 2000}),
        ("/v1/messages", chat([PART] * 2000)),
        ("/v1/messages", chat([{"type": "tool_result", "tool_use_id": "a", "content": [PART] * 2000}])),
        ("/v1/messages", chat("x", system=[PART] * 2000)),
        ("/v1/messages/count_tokens", chat([PART] * 2000)),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}] * 2000}]}),
        ("/v1/responses", {"input": [{}] * 5000}),
    ],
)
async def test_many_values_in_few_bytes_are_read_in_threads(
    running: Any, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    """A body of 100 KB holds up the event loop for a tenth of a second, and forty of them for seconds."""
    threads = []

    def noted(function: Any) -> Any:
        def note(*given: Any) -> Any:
            threads.append(threading.current_thread().name.partition("_")[0])
            return function(*given)

        return note

    monkeypatch.setattr(request_body, "validated", noted(request_body.validated))
    for model in (MessagesRequest, CountTokensRequest, ResponsesRequest):
        monkeypatch.setattr(model, "as_chat", noted(model.as_chat))
    monkeypatch.setattr(Message, "as_dict", noted(Message.as_dict))
    data = json.dumps({"max_tokens": 1, **body}).encode()
    assert len(data) < LARGE_BYTES
    reply = await running.http.post(path, content=data, headers={"content-type": "application/json"})
    assert reply.status_code in (200, 400), reply.text
    assert threads and set(threads) == {"text-long"}


MANY = {"role": "user", "content": [PART] * 2000}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [MANY, {}]}),
        ("/v1/chat/completions", {"messages": [MANY], "max_tokens": 10**6}),
        ("/v1/chat/completions", {"messages": [MANY], "model": "no such"}),
        ("/v1/messages", {"messages": [MANY], "max_tokens": 10**6}),
        ("/v1/messages", {"messages": [MANY, {"role": "user", "content": [{"type": "image"}]}], "max_tokens": 1}),
        ("/v1/messages/count_tokens", {"messages": [MANY]}),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "nothing"}] * 2000}]}),
    ],
)
async def test_a_request_leaves_nothing_to_the_garbage_collector(
    running: Any, tools: Any, path: str, body: dict[str, Any]
) -> None:
    """The collector comes seldom: what refers to itself takes hundreds of megabytes before."""
    data = json.dumps(body).encode()

    def is_freed() -> bool:
        return not any(
            isinstance(each, Message | ContentPart | Block | Item | Part)
            or (isinstance(each, RequestError) and (each.__cause__ or each.__traceback__))
            for each in gc.get_objects()
        )

    gc.collect()
    gc.disable()
    try:
        reply = await running.http.post(path, content=data, headers={"content-type": "application/json"})
        await tools.until(is_freed)
    finally:
        gc.enable()
    assert reply.status_code == (200 if "count" in path else 404 if "model" in body else 400), reply.text


async def test_small_requests_do_not_wait_for_large_ones(running: Any, tools: Any) -> None:
    text, opened = running.app.state.router_state.models.default.text, threading.Event()
    blocked = asyncio.create_task(text.apart(opened.wait, HUGE_TEXT + 1))
    try:
        large = [asyncio.create_task(running.completion(prompt="hi", unknown=PADDING, max_tokens=2)) for _ in range(3)]
        await tools.until(lambda: text.num_pending == 4)
        assert (await running.completion(max_tokens=2)).status_code == 200
        assert not any(task.done() for task in large)
    finally:
        opened.set()
    assert await blocked
    assert [reply.status_code for reply in await asyncio.gather(*large)] == [200] * 3
