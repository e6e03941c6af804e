from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ...examples import examples
from ..raw_http import POST

JSON = {"content-type": "application/json"}


def check(reply: Any, status: int, param: str | None = None, code: str | None = None) -> str:
    """Check the shape of an error, and return its message."""
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert reply.json().keys() == {"error"}
    assert error.keys() == {"message", "type", "param", "code"}
    assert reply.headers["content-type"] == "application/json"
    assert (error["param"], error["code"]) == (param, code)
    assert error["message"]
    return str(error["message"])


BODIES = {
    "not JSON": b"{",
    "nothing": b"",
    "a list": b"[]",
    "NaN": b'{"prompt":"a","temperature":NaN}',
    "infinity": b'{"prompt":"a","temperature":Infinity}',
    "a number beyond double": b'{"prompt":"a","temperature":1e999}',
    "invalid UTF-8": b'{"prompt":"\xff"}',
    "a lone surrogate": b'{"prompt":"\\ud800"}',
    "deep nesting": b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
}


@pytest.mark.quick_cover(1)
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
async def test_a_body_that_is_no_object(running: Any, path: str, body: bytes) -> None:
    check(await running.http.post(path, content=body, headers=JSON), 400)


FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": {}}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ["a", 5]}, "prompt[1]"),
    ({"prompt": [1, "a"]}, "prompt[1]"),
    ({"prompt": [[1], [1.5]]}, "prompt[1][0]"),
    ({"prompt": [True]}, "prompt[0]"),
    ({"prompt": [-1]}, "prompt[0]"),
    ({"prompt": [261]}, "prompt"),
    ({"prompt": [[1], [2**40]]}, "prompt[1][0]"),
    ({"prompt": ["a"] * 600, "n": 2}, "prompt"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 1.5}, "min_p"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"min_tokens": 17}, "min_tokens"),
    ({"seed": 2**63}, "seed"),
    ({"seed": 1e30}, "seed"),
    ({"stop": ["a"] * 65}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop[1]"),
    ({"stop": {"a": 1}}, "stop"),
    ({"stop": "x" * 1025}, "stop"),
    ({"stop_token_ids": [261]}, "stop_token_ids"),
    ({"stop_token_ids": [1] * 129}, "stop_token_ids"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -2.5}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"261": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias.1"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": -2}, "logprobs"),
    ({"logprobs": 1, "logprob_token_ids": [261]}, "logprob_token_ids"),
    ({"logprobs": 1, "logprob_token_ids": []}, "logprob_token_ids"),
    ({"logprob_token_ids": [1]}, "logprob_token_ids"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [1, 261]}, "allowed_token_ids"),
    ({"bad_words": [""]}, "bad_words[0]"),
    ({"bad_words": ["x"] * 257}, "bad_words"),
    ({"bad_words": ["é" * 1024]}, "bad_words"),
    ({"bad_words": [f"{i}".ljust(100, "x") for i in range(256)]}, "bad_words"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": 10**6}, "truncate_prompt_tokens"),
    ({"truncation_side": "left"}, "truncation_side"),
    ({"truncate_prompt_tokens": 1, "truncation_side": "middle"}, "truncation_side"),
    ({"thinking_token_budget": 5}, "thinking_token_budget"),
    ({"suffix": "end"}, "suffix"),
    ({"best_of": 0}, "best_of"),
    ({"n": 3, "best_of": 2}, "best_of"),
    ({"best_of": 129}, "best_of"),
    ({"logprobs": True}, "logprobs"),
    ({"stream": "yes"}, "stream"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"model": 5}, "model"),
    ({"user": 5}, "user"),
    ({"cache_salt": "x" * 257}, "cache_salt"),
]


@pytest.mark.parametrize(("fields", "param"), FIELDS, ids=[json.dumps(fields)[:40] for fields, _ in FIELDS])
async def test_a_field_of_the_wrong_type_or_range(running: Any, fields: dict[str, Any], param: str) -> None:
    for stream in ({}, {"stream": True}):
        check(await running.completion(**(stream | fields)), 400, param)
    assert not running.engine.requests


MESSAGES: list[tuple[Any, str]] = [
    (None, "messages"),
    ([], "messages"),
    ("hi", "messages"),
    ([5], "messages[0]"),
    ([{"content": "hi"}], "messages[0].role"),
    ([{"role": "", "content": "hi"}], "messages[0].role"),
    ([{"role": "r" * 65, "content": "hi"}], "messages[0].role"),
    ([{"role": "user", "content": 5}], "messages[0].content"),
    ([{"role": "user", "content": [{"text": "a"}]}], "messages[0].content[0].type"),
    ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "messages[0].content[0].text"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages[0].content"),
    ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "messages[0].tool_calls[0].function.name"),
]


@pytest.mark.parametrize(("messages", "param"), MESSAGES)
async def test_messages_of_the_wrong_form(running: Any, messages: Any, param: str) -> None:
    check(await running.chat(messages=messages), 400, param)


UNSUPPORTED: list[tuple[str, dict[str, Any]]] = [
    ("chat", {"best_of": 2}),
    ("chat", {"functions": [{"name": "f"}]}),
    ("chat", {"function_call": {"name": "f"}}),
    ("chat", {"chat_template": "{{ messages }}"}),
]


@pytest.mark.parametrize(("endpoint", "fields"), UNSUPPORTED)
async def test_what_is_not_supported_is_said(running: Any, endpoint: str, fields: dict[str, Any]) -> None:
    reply = await (running.chat if endpoint == "chat" else running.completion)(**fields)
    assert "not supported" in check(reply, 400, next(iter(fields)), "unsupported")


@pytest.mark.parametrize("fields", [{"suffix": ""}, {"best_of": 1}, {"prompt_logprobs": None}, {"bad_words": []}])
async def test_what_changes_nothing_is_no_error(running: Any, fields: dict[str, Any]) -> None:
    assert (await running.completion(**fields)).status_code == 200


async def test_a_prompt_that_is_too_long_says_the_numbers(running: Any) -> None:
    for prompt in ([5] * 4096, "x" * 4096, [[5], [5] * 4096]):
        param = "prompt[1]" if isinstance(prompt[0], list) else "prompt"
        message = check(await running.completion(prompt=prompt), 400, param, "context_length_exceeded")
        assert "maximum context length is 4096 tokens. However, you requested 4097 tokens" in message
    reply = await running.completion(prompt=[5] * 4000, max_tokens=97)
    message = check(reply, 400, "max_tokens", "context_length_exceeded")
    assert all(
        number in message for number in ("4000 in the prompt", "97 in the completion", "requested 4097", "is 4096")
    )
    messages = [{"role": "user", "content": "x" * 5000}]
    check(await running.chat(messages=messages), 400, "messages", "context_length_exceeded")
    assert not running.engine.requests


async def test_stream_options_without_a_stream(running: Any) -> None:
    check(await running.completion(stream_options={"include_usage": True}), 400, "stream_options")


@pytest.mark.slow
async def test_a_field_that_is_wrong_in_many_places_is_refused_at_once(running: Any) -> None:
    bias = {str(i): "x" for i in range(150_000)}
    check(await asyncio.wait_for(running.completion(logit_bias=bias), 60), 400, "logit_bias")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_another_model(running: Any, path: str) -> None:
    body = {"model": "gpt-9", "prompt": "a", "messages": [{"role": "user", "content": "a"}]}
    check(await running.http.post(path, json=body), 404, "model", "model_not_found")


@pytest.mark.parametrize("path", ["/nope", "/v1", "/v1/completions/", "/doc", "/v1/%ff"])
async def test_an_unknown_path(running: Any, path: str) -> None:
    check(await running.http.get(path), 404, None, "unknown_url")


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/completions"), ("DELETE", "/v1/models"), ("POST", "/ready")])
async def test_a_wrong_method(running: Any, method: str, path: str) -> None:
    reply = await running.http.request(method, path)
    check(reply, 405, None, "method_not_allowed")
    assert reply.headers["allow"]


async def test_every_method_of_a_path_is_named(running: Any) -> None:
    reply = await running.http.put("/ping")
    assert (reply.status_code, reply.headers["allow"]) == (405, "GET, HEAD, POST")


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"])
async def test_a_wrong_content_type(running: Any, kind: str) -> None:
    reply = await running.http.post("/v1/completions", content=b'{"prompt":"a"}', headers={"content-type": kind})
    check(reply, 415, None, "unsupported_media_type")


async def test_content_types_that_are_json(running: Any) -> None:
    for kind in ("application/json; charset=utf-8", "APPLICATION/JSON", "application/vnd.api+json"):
        reply = await running.http.post("/v1/completions", content=b'{"prompt":"a"}', headers={"content-type": kind})
        assert reply.status_code == 200


async def test_a_body_that_is_too_large(start: Any) -> None:
    running = await start(max_body_bytes=1024)
    for size in (1025, 3_000_000):
        reply = await running.http.post("/v1/completions", content=b"x" * size, headers=JSON)
        assert "1,024" in check(reply, 413, None, "request_too_large")
    assert (await running.http.get("/ready")).status_code == 200


async def test_a_body_of_unknown_size_that_is_too_large(start: Any) -> None:
    running = await start(max_body_bytes=1024)

    async def parts() -> Any:
        for _ in range(50):
            yield b"x" * 100

    check(await running.http.post("/v1/completions", content=parts(), headers=JSON), 413, None, "request_too_large")


async def test_a_client_that_leaves_while_it_sends(running: Any, tools: Any) -> None:
    host, port = running.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(POST + b"Content-Length: 100\r\n\r\n{")
    await writer.drain()
    await tools.until(lambda: running.app.state.router_state.num_active == 1)
    writer.close()
    await tools.until(lambda: running.app.state.router_state.num_active == 0)
    assert await running.metric("diptych_http_errors_total") == 1


# ---------------------------------------------------------------- whatever comes

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
names = st.sampled_from(
    ["prompt", "messages", "stop", "n", "logit_bias", "logprobs", "stream", "stream_options", "tools", "tool_choice",
     "response_format", "seed", "max_tokens", "chat_template_kwargs", "stop_token_ids", "model", "top_logprobs", "echo",
     "suffix", "best_of", "cache_salt", "temperature", "modalities", "function_call", "structured_outputs",
     "guided_json", "guided_regex", "guided_choice", "guided_grammar", "parallel_tool_calls"]
)  # fmt: skip
bodies = st.dictionaries(names, values, max_size=4)


@pytest.mark.slow
@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fields=bodies, path=st.sampled_from(["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]))
async def test_no_body_makes_a_server_error(running: Any, fields: dict[str, Any], path: str) -> None:
    base = {"prompt": "a"} if "chat" not in path else {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    reply = await running.http.post(path, content=json.dumps(base | fields), headers=JSON)
    assert reply.status_code in (200, 400, 404), reply.text
    if reply.status_code != 200:
        assert reply.json().keys() == {"error"}
