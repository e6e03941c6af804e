"""The values of a body are counted before they are made: no few bytes become gigabytes."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest
from pydantic import BaseModel

from common.errors import InvalidRequest
from router.api.anthropic.fields import MessagesRequest
from router.api.embeddings.fields import EmbeddingRequest
from router.api.responses.fields import ResponsesRequest
from router.request.body import parse_large
from router.request.fields import ChatRequest, CompletionRequest
from router.text.conversation import template_messages
from router.text.json_values import COUNTED_BYTES, MAX_VALUES, ValueCounter

MIB = 2**20
ROOM = 8 * MIB
TEXTS = ["", "a", "[{,]}", '"', "\\", '\\"', '",', "é€😀", "\n\t", "\\\\", '[1,1,"'] * 3


def counted(data: bytes, step: int, **bounds: int) -> tuple[int, int]:
    """The values other than numbers in lists, and these numbers, of text that arrives in pieces."""
    counter = ValueCounter("the body has", **bounds)
    for begin in range(0, len(data), step):
        counter.add(data[begin : begin + step])
    return counter._num_values, counter._num_numbers


def values_in(value: Any) -> tuple[int, int]:
    """The same, of a value, which does not count itself."""
    others = numbers = 0
    left = [value]
    while left:
        part = left.pop()
        if isinstance(part, dict | list):
            children = list(part.values()) if isinstance(part, dict) else part
            is_list = isinstance(part, list)
            are_numbers = sum(is_list and isinstance(child, int) and child >= 0 for child in children)
            others, numbers = others + len(children) - are_numbers, numbers + are_numbers
            left += children
    return others, numbers


@pytest.mark.quick_cover(1)
@pytest.mark.parametrize("step", [1, 2, 3, 7, 64, 10**6])
@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("ascii_only", [True, False])
def test_values_are_counted_whatever_stands_in_texts(step: int, indent: int | None, ascii_only: bool) -> None:
    value = {"messages": [{"role": "user", "content": text} for text in TEXTS], "n": 1, "x": [[], {}, [-1, None, "1"]]}
    data = json.dumps(value, indent=indent, ensure_ascii=ascii_only).encode()
    assert counted(data, step) == values_in(value) or step < len(data)
    assert sum(counted(data, step)) - sum(values_in(value)) in (0, 1, 2), "of an empty list and an empty object"


def test_token_ids_have_a_bound_of_their_own() -> None:
    ids = json.dumps({"prompt": [list(range(1000))] * 30}).encode()
    assert counted(ids, COUNTED_BYTES, max_values=1000, max_numbers=30_000)[1] == pytest.approx(30_000, abs=10)
    with pytest.raises(InvalidRequest, match="more than 20,000 numbers in lists"):
        counted(ids, COUNTED_BYTES, max_numbers=20_000)


UNITS = ["{}", '""', "[1]", '{"a":1}']
LISTS = [
    ("/v1/chat/completions", '{"messages":['),
    ("/v1/chat/completions", '{"messages":[{"role":"user","content":['),
    ("/v1/completions", '{"prompt":['),
    ("/v1/completions", '{"prompt":"hi","unknown":['),
    ("/v1/responses", '{"input":['),
    ("/v1/messages", '{"messages":['),
    ("/v1/embeddings", '{"input":['),
    ("/tokenize", '{"messages":['),
    ("/detokenize", '{"tokens":['),
]
MANY = [
    pytest.param(path, before, f"{unit},", marks=() if (i - k) % len(UNITS) == 0 else pytest.mark.slow)
    for i, (path, before) in enumerate(LISTS)
    for k, unit in enumerate(UNITS)
]
NESTED = [("/v1/completions", before, unit) for _, before in LISTS[2:4] for unit in ("[", '[{"":')]


@pytest.mark.parametrize(("path", "before", "unit"), MANY + NESTED)
async def test_a_body_of_many_values_is_refused_before_they_are_made(
    running: Any, path: str, before: str, unit: str
) -> None:
    data = (before + unit * ((ROOM - len(before)) // len(unit))).encode()
    tracemalloc.start()
    try:
        reply = await running.http.post(path, content=data, headers={"content-type": "application/json"})
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert reply.status_code == 400, reply.text
    assert f"more than {MAX_VALUES:,} JSON values" in reply.json()["error"]["message"]
    assert peak < 64 * MIB


SAID = {"role": "user", "content": "a"}
PART = {"type": "text", "text": "a"}
CALLED = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]}
NUM = 2000


def said(content: object, **fields: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 1, **fields}


def tool_of(values: object) -> dict[str, object]:
    return {"type": "function", "function": {"name": "f", "parameters": {"enum": values}}}


BODIES: dict[str, tuple[type[BaseModel], dict[str, object]]] = {
    "messages": (ChatRequest, {"messages": [SAID] * NUM}),
    "parts": (ChatRequest, said([PART] * NUM)),
    "calls": (ChatRequest, {"messages": [CALLED] * NUM}),
    "tools": (ChatRequest, said("a", tools=[{"type": "function", "function": {"name": "f"}}] * 1000)),
    "empty objects": (ChatRequest, said("a", tools=[tool_of([{}] * 50_000)])),
    "objects": (ChatRequest, said("a", tools=[tool_of([{"a": [{}]}] * 20_000)])),
    "token ids": (CompletionRequest, {"prompt": [*range(1000, 50_000)]}),
    "lists of token ids": (CompletionRequest, {"prompt": [[*range(1000, 1100)]] * 1000}),
    "items": (ResponsesRequest, {"input": [SAID] * NUM}),
    "turns": (MessagesRequest, {"messages": [SAID] * NUM, "max_tokens": 1}),
    "blocks": (MessagesRequest, said([PART] * NUM)),
    "texts": (EmbeddingRequest, {"input": ["a b"] * NUM}),
}


@pytest.mark.parametrize("name", BODIES)
def test_memory_of_objects_is_known_before_they_exist(name: str) -> None:
    """The bound includes the other API's fields, the chat request and the messages for the template."""
    model, body = BODIES[name]
    data = json.dumps(body, separators=(",", ":")).encode()
    counter = ValueCounter("the body has")
    counter.add(data)
    tracemalloc.start()
    try:
        parsed: Any = parse_large(data, model, 10**6, 10**6)
        chat = parsed.as_chat() if hasattr(parsed, "as_chat") else parsed
        messages = chat.messages if isinstance(chat, ChatRequest) else ()
        prepared = template_messages([message.as_dict() for message in messages])
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < counter.object_bytes
    assert peak < counter.object_bytes + 16 * len(data), "the parser needs memory besides the objects for a short time"
    assert counter.object_bytes < 12 * kept + MIB, "a bound that is far too high refuses ordinary bodies"
    del prepared
