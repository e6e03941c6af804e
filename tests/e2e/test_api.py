"""The HTTP API over real sockets, with real workers behind it: what clients rely on, not how it is made."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types import Completion

from benchmarks.stack import Stack, StackProcess, free_port
from common.model_files.resolve import resolve_model
from common.model_files.tokenizer import Tokenizer

from ..rig import MODEL, PROMPT, complete, owned, wait_until

pytestmark = pytest.mark.e2e

HELLO: Any = [{"role": "user", "content": "Hello"}]
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "extra_body": {"ignore_eos": True}}
BRIEF_QUEUE = ("--queue-timeout-s", "3")
"""Soon over where no worker is left to wait for, and longer than a busy machine keeps a worker from speaking."""


@pytest.fixture
def sdk(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(resolve_model(MODEL).tokenizer)


def events_of(client: httpx.Client, body: dict[str, Any], path: str = "/v1/completions") -> list[dict[str, Any]]:
    """The JSON of each event of a stream, which must end with [DONE]."""
    with client.stream("POST", path, json={"model": MODEL, "stream": True, **body}) as reply:
        assert reply.status_code == 200, reply.read()
        data = [line.removeprefix("data: ") for line in reply.iter_lines() if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    return [json.loads(one) for one in data[:-1]]


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(choice["text"] for event in events for choice in event["choices"])


# ---------------------------------------------------------------- the openai SDK


def test_sdk_chat_streams_what_it_answers(sdk: openai.OpenAI) -> None:
    whole = sdk.chat.completions.create(messages=HELLO, max_tokens=24, **GREEDY)
    stream = sdk.chat.completions.create(
        messages=HELLO, max_tokens=24, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason == "length"
    assert chunks[-1].choices == [] and chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 24
    assert {c.id for c in chunks} == {chunks[0].id} and chunks[0].id.startswith("chatcmpl-")


@pytest.mark.slow
def test_sdk_completion_streams_what_it_answers(sdk: openai.OpenAI) -> None:
    whole = sdk.completions.create(prompt=PROMPT, max_tokens=24, **GREEDY)
    chunks: list[Completion] = list(sdk.completions.create(prompt=PROMPT, max_tokens=24, stream=True, **GREEDY))
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == whole.choices[0].text
    assert whole.id.startswith("cmpl-") and whole.model == MODEL


@pytest.mark.slow
def test_sdk_choices_differ_and_repeat_with_their_seed(sdk: openai.OpenAI) -> None:
    def ask() -> list[str | None]:
        answer = sdk.chat.completions.create(model=MODEL, messages=HELLO, n=4, seed=5, max_tokens=16)
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        return [choice.message.content for choice in answer.choices]

    first = ask()
    assert len(set(first)) == 4
    assert ask() == first


def test_sdk_logprobs_are_those_of_the_text(sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.create(messages=HELLO, max_tokens=12, logprobs=True, top_logprobs=3, **GREEDY)
    choice = answer.choices[0]
    assert choice.logprobs is not None and choice.logprobs.content is not None
    raw = b"".join(bytes(token.bytes or ()) for token in choice.logprobs.content)
    assert raw.decode(errors="replace") == choice.message.content
    for token in choice.logprobs.content:
        assert len(token.top_logprobs) == 3 and token.top_logprobs[0].logprob == token.logprob <= 0


def test_sdk_sees_its_own_error_classes(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no-such"):
        sdk.chat.completions.create(model="no-such", messages=HELLO)
    with pytest.raises(openai.BadRequestError) as refused:
        sdk.completions.create(model=MODEL, prompt="x" * 5000)
    assert refused.value.code == "context_length_exceeded"
    numbers = refused.value.message.replace(",", "")
    assert "4096" in numbers and "5000" in numbers


def test_sdk_lists_the_model(sdk: openai.OpenAI) -> None:
    (model,) = sdk.models.list().data
    assert sdk.models.retrieve(model.id) == model
    assert model.id == MODEL and model.to_dict()["max_model_len"] == 4096


# ---------------------------------------------------------------- text and numbers


@pytest.mark.slow
def test_a_stop_string_over_tokens_cuts_the_answer(http: httpx.Client) -> None:
    text = complete(http, prompt=PROMPT, max_tokens=60)["choices"][0]["text"]
    stop = text[20:24]
    cut = complete(http, prompt=PROMPT, max_tokens=60, stop=stop)
    end = text.index(stop)
    assert cut["choices"][0]["text"] == text[:end] and cut["choices"][0]["finish_reason"] == "stop"
    assert cut["usage"]["completion_tokens"] <= len((text[:end] + stop).encode())  # U+FFFD may stand for one byte
    body = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0, "ignore_eos": True, "stop": [stop, "\x00never"]}
    events = events_of(http, body)
    assert text_of(events) == text[:end]
    assert [c["finish_reason"] for e in events for c in e["choices"] if c["finish_reason"]] == ["stop"]


def test_the_stop_string_is_kept_on_request(http: httpx.Client) -> None:
    text = complete(http, prompt=PROMPT, max_tokens=40)["choices"][0]["text"]
    kept = complete(http, prompt=PROMPT, max_tokens=40, stop=text[10:13], include_stop_str_in_output=True)
    assert kept["choices"][0]["text"] == text[: text.index(text[10:13]) + 3]


@pytest.mark.slow
@pytest.mark.parametrize("ids", ([0xC3, 0xA9], [0xF0, 0x9F, 0x99, 0x82], [0xE6, 0xBC, 0x41]))
def test_characters_split_over_tokens_stream_whole(http: httpx.Client, tokenizer: Tokenizer, ids: list[int]) -> None:
    bias = {str(token_id): 100 for token_id in ids}  # nothing but pieces of characters, in any order
    body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 64, "logit_bias": bias, "seed": 3, "return_token_ids": True}
    whole = complete(http, **{**body, "temperature": 1})["choices"][0]
    assert set(whole["token_ids"]) <= set(ids)
    assert whole["text"] == tokenizer.decode(whole["token_ids"])
    assert text_of(events_of(http, {**body, "ignore_eos": True})) == whole["text"]


def test_usage_counts_tokens_and_cached_ones(http: httpx.Client) -> None:
    prompt = [(7 * i) % 251 for i in range(200)]
    first, second = (complete(http, prompt=prompt, max_tokens=5)["usage"] for _ in range(2))
    assert (first["prompt_tokens"], first["completion_tokens"], first["total_tokens"]) == (200, 5, 205)
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert 100 <= second["prompt_tokens_details"]["cached_tokens"] < 200


def test_every_chunk_carries_usage_on_request(http: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = events_of(http, {"prompt": PROMPT, "max_tokens": 8, "ignore_eos": True, "stream_options": options})
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[-1] == 8 and events[-1]["choices"] == []


def test_prompts_by_choices_are_prompt_major(http: httpx.Client) -> None:
    prompts = ["one", "two"]
    answer = complete(http, prompt=prompts, n=2, echo=True, max_tokens=3)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["text"][:3] for choice in answer["choices"]] == ["one", "one", "two", "two"]
    assert answer["usage"]["prompt_tokens"] == 6 and answer["usage"]["completion_tokens"] == 12


def test_one_token_and_the_whole_context(http: httpx.Client) -> None:
    assert complete(http, prompt="x", max_tokens=1)["choices"][0]["finish_reason"] == "length"
    fits = complete(http, prompt=[65] * 4090, max_tokens=6)
    assert fits["usage"]["total_tokens"] == 4096


# ---------------------------------------------------------------- operations


def test_metrics_have_their_names(stack: Stack, http: httpx.Client) -> None:
    complete(http, prompt=PROMPT, max_tokens=4)
    text = http.get("/metrics").text
    for name in (
        "vllm:time_to_first_token_seconds_bucket",
        "vllm:inter_token_latency_seconds_bucket",
        "vllm:request_time_per_output_token_seconds_bucket",
        "vllm:e2e_request_latency_seconds_count",
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:request_success_total",
    ):
        assert f"\n{name}{{" in text, name
    for worker in stack.workers():
        page = httpx.get(f"{worker.http_url}/metrics", trust_env=False, timeout=30).text
        for name in (
            "vllm:num_requests_running",
            "vllm:kv_cache_usage_perc",
            "vllm:cache_config_info",
            "diptych_kv_blocks",
        ):
            assert f"\n{name}{{" in page, (worker.name, name)


def test_the_schema_names_every_endpoint_and_its_answers(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    for path in ("/v1/chat/completions", "/v1/completions"):
        operation = document["paths"][path]["post"]
        schema = operation["responses"]["200"]["content"]["application/json"]["schema"]
        assert schema["$ref"].rpartition("/")[2] in document["components"]["schemas"]
        assert operation["requestBody"]["content"]["application/json"]["schema"]
        assert "422" not in operation["responses"]


@pytest.mark.slow
def test_without_a_decode_worker_the_router_is_not_ready(system_of: Any) -> None:
    stack = system_of(router_flags=BRIEF_QUEUE).stack
    decode = stack.workers("decode")[0]
    with httpx.Client(base_url=stack.url, timeout=60, trust_env=False) as client:
        decode.kill()
        wait_until(lambda: client.get("/ready").status_code == 503, "/ready says 503")
        assert "decode" in client.get("/ready").text and client.get("/health").status_code == 200
        reply = client.post("/v1/completions", json={"model": MODEL, "prompt": "x", "stream": True})
        assert reply.status_code == 503 and int(reply.headers["retry-after"]) >= 1
        stack.restart(decode)
        wait_until(lambda: client.get("/ready").status_code == 200, "/ready says 200 again")
        assert complete(client, prompt="x", max_tokens=3)["usage"]["completion_tokens"] == 3


@pytest.mark.slow
@pytest.mark.parametrize("path", ("/v1/completions", "/v1/chat/completions"))
def test_a_failure_after_the_start_is_an_event(system_of: Any, path: str) -> None:
    stack = system_of(router_flags=BRIEF_QUEUE).stack
    decode = stack.workers("decode")[0]
    prompt = {"prompt": "x"} if path == "/v1/completions" else {"messages": HELLO}
    body = {"model": MODEL, "max_tokens": 3500, "ignore_eos": True, "stream": True, **prompt}
    with (
        httpx.Client(base_url=stack.url, timeout=60, trust_env=False) as client,
        client.stream("POST", path, json=body) as reply,
    ):
        lines = reply.iter_lines()
        assert next(line for line in lines if line.startswith("data: "))  # behind comments, if it took long
        decode.kill()  # the only one
        last = json.loads(list(filter(None, lines))[-1].removeprefix("data: "))
        assert set(last["error"]) == {"message", "type", "param", "code"} and "decode" in last["error"]["message"]
        stack.restart(decode)
        wait_until(lambda: is_ready(client), "the router is ready again")


@pytest.mark.slow
def test_two_routers_share_the_workers(stack: Stack, http: httpx.Client, tmp_path: Any) -> None:
    second = StackProcess("router-1", "router", stack.router.command, tmp_path / "router-1.log")
    port = free_port()
    second.command[second.command.index("--port") + 1] = str(port)
    for role in ("prefill", "decode"):
        second.command += [f"--{role}", ",".join(worker.addresses["address"] for worker in stack.workers(role))]
    second.start()
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as other:
        try:
            wait_until(lambda: is_ready(other), "the second router is ready")
            assert (
                complete(other, prompt=PROMPT, max_tokens=9)["choices"]
                == complete(http, prompt=PROMPT, max_tokens=9)["choices"]
            )
            body = {"model": MODEL, "prompt": "x", "max_tokens": 3000, "ignore_eos": True, "stream": True}
            with other.stream("POST", "/v1/completions", json=body) as reply:
                assert reply.status_code == 200
                second.kill()  # in the middle of its stream
            assert complete(http, prompt=PROMPT, max_tokens=9)["usage"]["completion_tokens"] == 9
            wait_until(lambda: not any(owned(stack).values()), "what the dead router asked for is given up")
        except httpx.TransportError:
            pytest.fail(second.log_tail())
        finally:
            second.stop()


@pytest.mark.slow
def test_a_key_guards_the_api_and_not_the_probes(system_of: Any) -> None:
    stack = system_of(router_flags=("--api-key", "s3cret", "--local-prefill-threshold", "0")).stack
    with httpx.Client(base_url=stack.url, timeout=60, trust_env=False) as client:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "s3cret"}, {"x-api-key": ""}):
            reply = client.post("/v1/completions", json={"model": MODEL, "prompt": "x"}, headers=headers)
            assert reply.status_code == 401 and reply.json()["error"]["code"] == "invalid_api_key"
        for headers in ({"authorization": "Bearer s3cret"}, {"x-api-key": "s3cret"}):
            assert client.get("/v1/models", headers=headers).status_code == 200
        assert [client.get(path).status_code for path in ("/health", "/ready", "/metrics")] == [200, 200, 200]


@pytest.mark.slow
def test_a_stopped_router_finishes_its_streams(system_of: Any) -> None:
    stack = system_of(router_flags=("--max-retries", "2")).stack
    body = {"model": MODEL, "prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with (
        httpx.Client(base_url=stack.url, timeout=60, trust_env=False) as client,
        client.stream("POST", "/v1/completions", json=body) as reply,
    ):
        lines = reply.iter_lines()
        next(lines)
        stack.router.terminate()
        assert list(filter(None, lines))[-1] == "data: [DONE]"
    wait_until(lambda: not stack.router.alive, "the router ends")
    assert stack.router.returncode == 0, stack.router.log_tail()


def is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/ready").status_code == 200
    except httpx.TransportError:
        return False
