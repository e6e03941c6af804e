"""Embeddings, scores and rankings at the socket, in front of an engine that makes vectors of prompts' tokens."""

from __future__ import annotations

import asyncio
import base64
import math
import threading
from array import array
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import openai
import orjson
import pytest
import tokenizers
from openai.types.embedding_create_params import EmbeddingCreateParams

from common.errors import Unavailable
from common.model_files.files import ModelFiles
from common.model_files.task import ServedTask
from common.model_files.tokenizer import Tokenizer
from router.api.embeddings.endpoints import EmbeddingSerializer
from router.api.embeddings.fields import EmbeddingRequest
from router.dispatch.client import GenerationRequest, TokenEvent
from router.text.text_pipeline import TextPipeline

from ...application import TIMELINE, Engine, Start

WIDTH = 64
LIMIT = 4096
FIRST, LAST = 257, 258


@dataclass
class PoolingEngine(Engine):
    """Makes a vector of `width` numbers of each prompt, from its tokens; `peak` of them at a time at most."""

    width: int = WIDTH
    peak: int = 0
    running: int = 0
    salts: set[str] = field(default_factory=set)

    async def _events(self, request: GenerationRequest) -> AsyncIterator[TokenEvent]:
        self.running += 1
        self.peak = max(self.peak, self.running)
        self.salts.add(request.cache_salt)
        await asyncio.sleep(0.002)
        self.running -= 1
        if self.error is not None:
            raise self.error
        assert request.params.pooling and request.pooled_width == self.width
        yield TokenEvent(
            (), (), "stop", self.cached, TIMELINE, (), vector(request.prompt_token_ids, self.width).tobytes()
        )


def vector(tokens: list[int], width: int = WIDTH) -> array[float]:
    return array("f", [math.sin(1 + i + sum(tokens)) * len(tokens) for i in range(width)])


def unit(numbers: list[float]) -> list[float]:
    length = math.hypot(*numbers)
    return [number / length for number in numbers]


async def test_a_vector_for_each_input_in_its_order(start: Start) -> None:
    running = await start(PoolingEngine(), task="embed")
    texts = ["one", "two", "three"]
    reply = await running.http.post("/v1/embeddings", json={"model": "tiny-random", "input": texts})
    body = reply.json()
    assert reply.status_code == 200 and set(body) == {"object", "data", "model", "usage"}
    assert body["usage"] == {"prompt_tokens": 11, "total_tokens": 11} and body["model"] == "tiny-random"
    for index, (one, text) in enumerate(zip(body["data"], texts, strict=True)):
        assert (one["object"], one["index"]) == ("embedding", index)
        assert one["embedding"] == pytest.approx(unit(vector(list(text.encode())).tolist()), abs=1e-6)
    assert await running.metric("vllm:prompt_tokens_total") == 11
    assert await running.metric('vllm:request_success_total{engine="router",finished_reason="stop"') == 3


@pytest.mark.parametrize("given", ["one", ["one"], [*b"one"], [[*b"one"]]])
async def test_forms_of_input(start: Start, given: Any) -> None:
    running = await start(PoolingEngine(), task="embed")
    (one,) = (await running.http.post("/v1/embeddings", json={"input": given})).json()["data"]
    assert one["embedding"] == pytest.approx(unit(vector([*b"one"]).tolist()), abs=1e-6)


async def test_base64_dimensions_and_raw_vectors(start: Start) -> None:
    running, raw = await start(PoolingEngine(), task="embed"), vector([*b"one"]).tolist()

    async def ask(**fields: Any) -> Any:
        return (await running.http.post("/v1/embeddings", json={"input": "one", **fields})).json()["data"][0][
            "embedding"
        ]

    packed = array("f", base64.b64decode(await ask(encoding_format="base64")))
    assert packed.tolist() == pytest.approx(unit(raw), abs=1e-6)
    assert await ask(dimensions=5) == pytest.approx(unit(raw[:5]), abs=1e-6)
    assert await ask(dimensions=WIDTH) == pytest.approx(unit(raw), abs=1e-6)
    assert await ask(normalize=False) == raw
    assert await ask(normalize=False, dimensions=5) == raw[:5]


@pytest.mark.parametrize(("num_inputs", "encoding"), [(32, "float"), (126, "base64")])
async def test_a_thread_writes_many_vectors(
    start: Start, monkeypatch: pytest.MonkeyPatch, num_inputs: int, encoding: str
) -> None:
    threads: list[int] = []

    def encoded(self: EmbeddingSerializer, values: bytes) -> orjson.Fragment:
        threads.append(threading.get_ident())
        return orjson.Fragment(b"[]")

    monkeypatch.setattr(EmbeddingSerializer, "_shown", encoded)
    running = await start(PoolingEngine(), task="embed")
    for num in (1, num_inputs):
        body = {"input": [[1]] * num, "encoding_format": encoding}
        assert (await running.http.post("/v1/embeddings", json=body)).status_code == 200
    assert threads.count(threading.get_ident()) == 1 and len(threads) == 1 + num_inputs


async def test_the_sdk(start: Start) -> None:
    running = await start(PoolingEngine(), task="embed")
    async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none") as client:
        found = await client.embeddings.create(model="tiny-random", input=["one", "two"])
        assert found.data[1].embedding == pytest.approx(unit(vector([*b"two"]).tolist()), abs=1e-6)
        with pytest.raises(openai.NotFoundError):
            await client.embeddings.create(model="another", input="one")


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"input": []}, "input", "input: must not be empty"),
    ({"input": ""}, "input", "input: must not be empty"),
    ({"input": ["a", ""]}, "input[1]", "input[1]: must not be empty"),
    ({"input": [1, 9999]}, "input", "Token id 9999 is not in the vocabulary"),
    ({"input": ["a"] * 2049}, "input", "2048"),
    ({"input": "a", "dimensions": WIDTH + 1}, "dimensions", f"dimensions: must be at most {WIDTH}, "),
    ({"input": "a", "dimensions": 0}, "dimensions", "greater than or equal to 1"),
    ({"input": "a", "encoding_format": "hex"}, "encoding_format", "'float' or 'base64'"),
    ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "must be -1 or at least 1"),
    ({"input": "a", "truncate_prompt_tokens": 99999}, "truncate_prompt_tokens", "got 99,999"),
    ({"input": "a", "truncation_side": "left"}, "truncation_side", "only allowed with truncate_prompt_tokens"),
    ({"input": [[7] * 3000] * 101}, "input[100]", "have 303,000 tokens; the limit is 300,000"),
    ({"messages": [{"role": "user", "content": "a"}], "input": "a"}, "messages", "not supported"),
]


@pytest.mark.parametrize(("fields", "param", "why"), WRONG)
async def test_what_is_wrong_is_a_400(start: Start, fields: dict[str, Any], param: str, why: str) -> None:
    running = await start(PoolingEngine(max_model_len=LIMIT), task="embed")
    reply = await running.http.post("/v1/embeddings", json=fields)
    error = reply.json()["error"]
    assert reply.status_code == 400 and why in error["message"] and error["param"] == param
    assert not running.engine.requests


async def test_a_text_that_is_too_long_is_refused_or_cut(start: Start) -> None:
    running = await start(PoolingEngine(max_model_len=8), task="embed")
    for given, param in (("0123456789", "input"), (["a", [*b"0123456789"]][1:], "input[0]")):
        error = (await running.http.post("/v1/embeddings", json={"input": given})).json()["error"]
        assert error["code"] == "context_length_exceeded" and error["param"] == param
        assert "maximum context length is 8 tokens" in error["message"] and "10 in the prompt, 0 in" in error["message"]
    for fields, kept in (
        ({"truncate_prompt_tokens": -1}, b"01234567"),
        ({"truncate_prompt_tokens": 3}, b"012"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "left"}, b"789"),
    ):
        assert (await running.http.post("/v1/embeddings", json={"input": "0123456789", **fields})).status_code == 200
        assert list(running.engine.requests[-1].prompt_token_ids) == [*kept]


@pytest.fixture
def framed(files: ModelFiles) -> Iterator[TextPipeline]:
    """The tiny model's tokenizer, as one that puts special tokens around each text and between those of a pair."""
    inner = tokenizers.Tokenizer.from_file(str(files.tokenizer))
    first, last = (inner.id_to_token(token_id) for token_id in (FIRST, LAST))
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{first} $A {last}",
        pair=f"{first} $A {last} $B:1 {last}:1",
        special_tokens=[(first, FIRST), (last, LAST)],
    )
    pipeline = TextPipeline(Tokenizer(inner), None, max_model_len=LIMIT, threads=1, vocab_size=files.vocab_size)
    yield pipeline
    pipeline.close()


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({}, [FIRST, *b"0123456789", LAST]),
        ({"truncate_prompt_tokens": 5}, [FIRST, *b"012", LAST]),
        ({"truncate_prompt_tokens": 5, "truncation_side": "left"}, [FIRST, *b"789", LAST]),
        ({"truncate_prompt_tokens": 12}, [FIRST, *b"0123456789", LAST]),
        ({"truncate_prompt_tokens": 2}, [FIRST, ord("0")]),
        ({"add_special_tokens": False, "truncate_prompt_tokens": 3}, [*b"012"]),
    ],
)
async def test_special_tokens_stay_around_a_text_that_is_cut(
    start: Start, framed: TextPipeline, fields: dict[str, Any], kept: list[int]
) -> None:
    running = await start(PoolingEngine(), task="embed", pipeline=framed)
    reply = await running.http.post("/v1/embeddings", json={"input": "0123456789", **fields})
    assert reply.status_code == 200 and list(running.engine.requests[-1].prompt_token_ids) == kept


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 8}, [FIRST, *b"ab", LAST, *b"012", LAST]),
        ({"truncate_prompt_tokens": 8, "truncation_side": "left"}, [FIRST, *b"ab", LAST, *b"789", LAST]),
        ({"truncate_prompt_tokens": 5}, [FIRST, *b"a", LAST, *b"0", LAST]),
    ],
)
async def test_special_tokens_stay_around_a_pair_that_is_cut(
    start: Start,
    framed: TextPipeline,
    fields: dict[str, Any],
    kept: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the model reads a score from may be the last of them."""
    task = ServedTask("score", "last", 1, sigmoid=True)
    monkeypatch.setattr("router.generation.served_model.served_task", lambda *_: task)
    running = await start(PoolingEngine(width=1), pipeline=framed)
    for path, body in (
        ("/v1/score", {"text_1": "ab", "text_2": "0123456789"}),
        ("/v1/rerank", {"query": "ab", "documents": ["0123456789"]}),
    ):
        assert (await running.http.post(path, json=body | fields)).status_code == 200
        assert list(running.engine.requests[-1].prompt_token_ids) == kept


async def test_a_plain_prompt_keeps_its_special_tokens_when_it_is_cut(start: Start, framed: TextPipeline) -> None:
    running = await start(pipeline=framed)
    body = {"prompt": "0123456789", "max_tokens": 1, "truncate_prompt_tokens": 5}
    for side, kept in (("left", b"789"), ("right", b"012")):
        reply = await running.http.post("/v1/completions", json=body | {"truncation_side": side})
        assert reply.status_code == 200
        assert list(running.engine.requests[-1].prompt_token_ids) == [FIRST, *kept, LAST]


@pytest.mark.slow
async def test_many_inputs_take_turns(start: Start) -> None:
    running = await start(PoolingEngine(), task="embed", max_inflight=20)
    reply = await running.http.post("/v1/embeddings", json={"input": [[1 + i % 200] for i in range(2048)]})
    data = reply.json()["data"]
    assert reply.status_code == 200 and len(data) == 2048 and running.engine.peak == 10
    assert data[2000]["embedding"] == pytest.approx(unit(vector([1]).tolist()), abs=1e-6)


async def test_what_the_pools_refuse(start: Start) -> None:
    running = await start(PoolingEngine(error=Unavailable("no prefill worker", retry_after_s=2)), task="embed")
    reply = await running.http.post("/v1/embeddings", json={"input": ["a", "b"]})
    assert reply.status_code == 503 and reply.headers["retry-after"] == "2"


async def test_cosines_of_pairs_and_rankings(start: Start) -> None:
    running = await start(PoolingEngine(), task="embed")

    def cosine(one: str, other: str) -> float:
        first, second = (unit(vector([*text.encode()]).tolist()) for text in (one, other))
        return sum(a * b for a, b in zip(first, second, strict=True))

    post, texts = running.http.post, ["two", "one", "three"]
    body = (await post("/v1/score", json={"text_1": "one", "text_2": texts})).json()
    exact = [cosine("one", text) for text in texts]
    assert [one["score"] for one in body["data"]] == pytest.approx(exact, abs=1e-6)
    assert body["data"][1] == {"index": 1, "object": "score", "score": pytest.approx(1.0)}
    pairs = (await post("/v1/score", json={"text_1": texts, "text_2": texts[::-1]})).json()["data"]
    assert [one["score"] for one in pairs] == pytest.approx([cosine(*p) for p in zip(texts, texts[::-1], strict=True)])
    ranking = (await post("/v1/rerank", json={"query": "one", "documents": texts, "top_n": 2})).json()
    order = sorted(range(3), key=lambda index: -exact[index])
    assert [one["index"] for one in ranking["results"]] == order[:2]
    assert ranking["results"][0]["document"] == {"text": "one"}
    bare = (await post("/v1/rerank", json={"query": "one", "documents": texts, "return_documents": False})).json()
    assert all("document" not in one for one in bare["results"]) and len(bare["results"]) == 3
    wrong = (await post("/v1/score", json={"text_1": ["a", "b"], "text_2": texts})).json()["error"]
    assert wrong["param"] == "text_1" and "the number of texts of text_2 (3), got 2" in wrong["message"]


@pytest.mark.parametrize(
    ("task", "path", "body", "why"),
    [
        ("embed", "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "embeds texts"),
        ("embed", "/v1/completions", {"prompt": "a"}, "embeds texts"),
        ("embed", "/v1/responses", {"input": "a"}, "embeds texts"),
        (
            "auto",
            "/v1/embeddings",
            {"input": "a"},
            "generates text. This endpoint requires a model served with --task embed",
        ),
        ("auto", "/v1/score", {"text_1": "a", "text_2": "b"}, "--task embed or --task score"),
        ("generate", "/v1/rerank", {"query": "a", "documents": ["b"]}, "--task embed or --task score"),
    ],
)
async def test_each_model_for_its_task(start: Start, task: str, path: str, body: dict[str, Any], why: str) -> None:
    running = await start(task=task)
    reply = await running.http.post(path, json=body)
    assert reply.status_code == 400 and why in reply.json()["error"]["message"]
    assert reply.json()["error"]["param"] == "model" and not running.engine.requests


async def test_the_log_and_the_times(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    running = await start(PoolingEngine(cached=2), task="embed")
    with caplog.at_level("INFO"):
        await running.http.post("/v1/embeddings", json={"input": ["one", "two"]})
    (record,) = [one for one in caplog.records if one.getMessage() == "request"]
    assert (record.prompt, record.cached, record.output, record.finish) == (6, 4, 0, "stop")  # type: ignore[attr-defined]
    assert 0 < await running.metric("vllm:e2e_request_latency_seconds_sum") < 30


def test_every_field_of_the_official_client_is_known() -> None:
    assert set(EmbeddingCreateParams.__annotations__) <= set(EmbeddingRequest.model_fields)
