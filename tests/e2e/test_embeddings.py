"""Embeddings and scores through real processes: those of `transformers`, whatever batch, chunks and cache."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

from common.model_files.tokenizer import Tokenizer

from ..pooling_models import WIDTH, PoolingOracle, make_model, score_of
from ..rig import IS_OWN_ENGINE, samples, wait_until
from .test_failures import SLOW_PREFILL, is_busy

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

LENGTHS = (1, 2, 15, 16, 17, 33, 64, 100, 300, 512)
ATOL = 1e-5
TWO_RANKS = ("--tensor-parallel-size", "2")


@pytest.fixture(scope="module", params=[("lasttoken", True), ("mean_tokens", False)], ids=["last", "mean"])
def embedding_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, bool]:
    mode, normalise = request.param
    return make_model(tmp_path_factory.mktemp(mode) / mode, mode=mode, normalise=normalise), mode, normalise


@pytest.fixture(scope="module", params=["score", "answer"])
def reranker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    return make_model(tmp_path_factory.mktemp("reranker") / request.param, request.param), request.param


def embedded(system: Any, given: Any, **fields: Any) -> list[list[float]]:
    reply = httpx.post(f"{system.stack.url}/v1/embeddings", json={"input": given, **fields}, timeout=240)
    assert reply.status_code == 200, reply.text
    body = reply.json()
    assert [one["index"] for one in body["data"]] == list(range(len(body["data"])))
    return [one["embedding"] for one in body["data"]]


@pytest.mark.parametrize("flags", [(), SLOW_PREFILL, TWO_RANKS], ids=["whole", "chunked", "two ranks"])
def test_they_are_those_of_transformers(
    system_of: Any, random_prompts: Any, embedding_model: tuple[Path, str, bool], flags: tuple[str, ...]
) -> None:
    folder, mode, normalise = embedding_model
    if not IS_OWN_ENGINE and (mode, flags) == ("mean_tokens", SLOW_PREFILL):
        pytest.skip("vLLM computes means of whole prompts only")
    system, oracle = system_of(1, 0, model=str(folder), worker_flags=flags), PoolingOracle(folder)
    prompts = random_prompts(LENGTHS, vocab_size=256, seed=7)
    exact = [oracle.embedding(prompt, mode, normalise=normalise) for prompt in prompts]
    alone = [embedded(system, prompt)[0] for prompt in prompts]
    batched = embedded(system, prompts)  # what is cached of them by now does not change them
    with ThreadPoolExecutor(len(prompts)) as pool:
        at_once = list(pool.map(lambda prompt: embedded(system, prompt, cache_salt="another")[0], prompts))
    for found in (alone, batched, at_once):
        for vector, wanted in zip(found, exact, strict=True):
            assert torch.tensor(vector) == pytest.approx(wanted, abs=ATOL)
    longer = [*prompts[-2], *prompts[2]]  # of which most is cached
    assert embedded(system, longer)[0] == pytest.approx(oracle.embedding(longer, mode, normalise=normalise), abs=ATOL)


def test_cached_tokens_serve_the_last_token_and_not_the_mean(
    system_of: Any, random_prompts: Any, embedding_model: tuple[Path, str, bool]
) -> None:
    folder, mode, _ = embedding_model
    system = system_of(1, 0, model=str(folder))
    (prompt,) = random_prompts((129,), vocab_size=256, seed=8)
    hits = system.metric("vllm:prefix_cache_hits")
    for _ in range(2):
        embedded(system, prompt)
    assert system.metric("vllm:prefix_cache_hits") - hits == (128 if mode == "lasttoken" else 0)


def test_the_sdk_and_its_base64(system_of: Any, embedding_model: tuple[Path, str, bool], closing: ExitStack) -> None:
    folder, mode, normalise = embedding_model
    system, oracle = system_of(1, 0, model=str(folder)), PoolingOracle(folder)
    client = closing.enter_context(openai.OpenAI(base_url=f"{system.stack.url}/v1", api_key="none"))
    texts = ["a diptych", "two panels, hinged together", "ä🙂"]
    tokenizer = Tokenizer.from_file(folder / "tokenizer.json")
    ids = [tokenizer.encode(text) for text in texts]
    answer = client.embeddings.create(model=folder.name, input=texts)  # asks for base64
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, ids))
    for one, tokens in zip(answer.data, ids, strict=True):
        assert one.embedding == pytest.approx(oracle.embedding(tokens, mode, normalise=normalise).tolist(), abs=ATOL)
    shorter = client.embeddings.create(model=folder.name, input=texts[0], dimensions=16).data[0].embedding
    cut = torch.nn.functional.normalize(oracle.embedding(ids[0], mode, normalise=False)[:16], dim=0)
    assert shorter == pytest.approx(cut.tolist(), abs=ATOL)
    with pytest.raises(openai.BadRequestError, match=f"dimensions: must be at most {WIDTH}, .* got {WIDTH + 1}"):
        client.embeddings.create(model=folder.name, input=texts[0], dimensions=WIDTH + 1)


def test_more_inputs_than_requests_in_flight(system_of: Any, embedding_model: tuple[Path, str, bool]) -> None:
    folder, mode, normalise = embedding_model
    system = system_of(1, 0, model=str(folder), router_flags=("--max-inflight", "8"))
    vectors = embedded(system, [[1 + i % 200, 7] for i in range(2048)])
    assert len(vectors) == 2048
    exact = PoolingOracle(folder).embedding([1 + 150, 7], mode, normalise=normalise)
    assert vectors[150] == vectors[350] == pytest.approx(exact.tolist(), abs=ATOL)


def test_a_killed_prefill_worker_costs_nothing(
    system_of: Any, random_prompts: Any, embedding_model: tuple[Path, str, bool]
) -> None:
    folder, mode, normalise = embedding_model
    system, oracle = system_of(2, 0, model=str(folder), worker_flags=SLOW_PREFILL), PoolingOracle(folder)
    prompts = random_prompts((500,) * 40, vocab_size=256, seed=9)
    victim, router = system.stack.workers("prefill")[0], system.stack.router
    retries = sum(samples(router, "diptych_retries", 'role="prefill"'))
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(embedded, system, prompts)
        wait_until(lambda: is_busy(system, victim), "the victim has work")
        victim.kill()
        vectors = asked.result()
    system.stack.restart(victim)
    assert sum(samples(router, "diptych_retries", 'role="prefill"')) > retries
    for vector, prompt in zip(vectors, prompts, strict=True):
        assert vector == pytest.approx(oracle.embedding(prompt, mode, normalise=normalise).tolist(), abs=ATOL)


def test_scores_are_cosines_of_embeddings(system_of: Any, embedding_model: tuple[Path, str, bool]) -> None:
    folder, mode, _ = embedding_model
    system, oracle = system_of(1, 0, model=str(folder)), PoolingOracle(folder)
    tokenizer = Tokenizer.from_file(folder / "tokenizer.json")
    query, texts = "a question", ["an answer", "something else", "a question"]
    vectors = [oracle.embedding(tokenizer.encode(text), mode, normalise=True) for text in (query, *texts)]
    exact = [float(vectors[0] @ vector) for vector in vectors[1:]]
    with httpx.Client(base_url=system.stack.url, timeout=60, trust_env=False) as client:
        body = client.post("/v1/score", json={"text_1": query, "text_2": texts}).json()
        assert [one["score"] for one in body["data"]] == pytest.approx(exact, abs=ATOL)
        assert body["data"][2]["score"] == pytest.approx(1.0, abs=ATOL)
        pairs = client.post("/v1/score", json={"text_1": texts, "text_2": texts}).json()["data"]
        assert [one["score"] for one in pairs] == pytest.approx([1.0] * 3, abs=ATOL)
        ranked = client.post("/v1/rerank", json={"query": query, "documents": texts, "top_n": 2}).json()["results"]
        assert ranked[0]["index"] == 2 and len(ranked) == 2
        refused = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}]})
        assert refused.status_code == 400 and "embeds texts" in refused.json()["error"]["message"]


def test_a_reranker_scores_pairs(system_of: Any, reranker: tuple[Path, str]) -> None:
    folder, kind = reranker
    flags = ("--task", "score") if kind == "answer" else ()
    system = system_of(1, 0, model=str(folder), worker_flags=flags, router_flags=flags)
    tokenizer = Tokenizer.from_file(folder / "tokenizer.json")
    query, texts = "a question", ["an answer", "something else, and longer"]
    exact = [score_of(folder, kind, tokenizer.encode_pair(query, text)) for text in texts]
    with httpx.Client(base_url=system.stack.url, timeout=60, trust_env=False) as client:
        body = client.post("/v1/score", json={"text_1": query, "text_2": texts}).json()
        assert [one["score"] for one in body["data"]] == pytest.approx(exact, abs=ATOL)
        order = [
            one["index"]
            for one in client.post("/v1/rerank", json={"query": query, "documents": texts}).json()["results"]
        ]
        assert order == sorted(range(2), key=lambda index: -exact[index])
        refused = client.post("/v1/embeddings", json={"input": "a text"})
        assert refused.status_code == 400 and "scores pairs of texts" in refused.json()["error"]["message"]


def test_a_model_that_generates_does_not_embed(system_of: Any) -> None:
    system = system_of()
    for path, body in (("embeddings", {"input": "a"}), ("score", {"text_1": "a", "text_2": "b"})):
        refused = httpx.post(f"{system.stack.url}/v1/{path}", json=body, timeout=60)
        assert refused.status_code == 400
        assert "'tiny-random' generates text. This endpoint requires a model served with --task" in refused.text
