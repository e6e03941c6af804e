"""Paced workers: answers that depend on every block, steps that last as long as the coefficients say."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest

from benchmarks.simulator.world.coefficients import StepCoefficients
from benchmarks.stack import StackSettings
from common.engine.kv.cache import KVCache
from common.engine.models.batch import SequenceChunk
from common.errors import ModelError
from common.latency.step_model import StepShape

from . import paced
from .paced import (
    EXAMPLE,
    FIRST_TOKEN,
    NUM_TOKENS,
    Coefficients,
    PacedModel,
    PacedRunner,
    PacedStack,
    answer,
    write_folder,
)

PACE = StepCoefficients(fixed_s=0.5, floor_s=0.2, token_s=0.01, pair_s=1e-4, row_s=0.03, context_s=1e-3)


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What steps would have slept."""
    seconds: list[float] = []
    monkeypatch.setattr(paced, "time", SimpleNamespace(sleep=seconds.append, perf_counter=lambda: 0.0))
    return seconds


@pytest.fixture
def runner(tmp_path: Path, slept: list[float]) -> PacedRunner:
    model = PacedModel(write_folder(Coefficients(PACE, PACE, 64), tmp_path / "m", 4096))
    return PacedRunner(
        model, KVCache(model.config, 16, 16, "float32"), Coefficients(prefill=PACE, decode=PACE), lambda: "decode"
    )


def generated(runner: PacedRunner, prompt: list[int], sizes: tuple[int, ...], table: tuple[int, ...]) -> list[int]:
    """Ten tokens behind a prompt that is computed in chunks of `sizes`."""
    known, start = list(prompt), 0
    for size in (*sizes, len(prompt) - sum(sizes), *[1] * 9):
        logits = runner.forward([SequenceChunk(known[start : start + size], start, table)])
        start += size
        if start >= len(prompt):
            known.append(int(logits[0].argmax()))
    return known[len(prompt) :]


def test_an_answer_does_not_depend_on_chunks_or_blocks(runner: PacedRunner) -> None:
    prompt = [(7 * place) % 256 for place in range(70)]
    expected = answer(prompt, 10)
    assert generated(runner, prompt, (), (0, 1, 2, 3, 4)) == expected
    assert generated(runner, prompt, (16, 1, 20), (9, 3, 7, 15, 0)) == expected
    assert all(FIRST_TOKEN <= token < FIRST_TOKEN + NUM_TOKENS for token in expected)
    assert answer([*prompt[:3], 0, *prompt[4:]], 10) != expected


def test_a_changed_block_changes_the_answer(runner: PacedRunner) -> None:
    runner.forward([SequenceChunk(tuple(range(32)), 0, (0, 1))])
    good = runner.forward([SequenceChunk((5,), 32, (0, 1, 2))]).argmax()
    runner.kv.block_tensor(1).zero_()
    assert runner.forward([SequenceChunk((5,), 32, (0, 1, 2))]).argmax() != good


def test_every_byte_of_the_kv_is_written(runner: PacedRunner) -> None:
    runner.forward([SequenceChunk(tuple(range(16)), 0, (3,))])
    assert runner.kv.block_bytes == 16 * 64
    block = bytes(runner.kv.block(3))
    assert all(block[place : place + 8] != bytes(8) for place in range(0, len(block), 8))


def test_a_step_takes_what_the_coefficients_say(runner: PacedRunner, slept: list[float]) -> None:
    runner.forward([SequenceChunk((1,) * 64, 0, (0, 1, 2, 3))])
    runner.forward([SequenceChunk((1,), 64, (0, 1, 2, 3, 4)), SequenceChunk((1,), 9, (5,))])
    expected = [PACE.model().seconds(StepShape.of_prompt(0, 64)), PACE.model().seconds(StepShape.of_rows(2, 75))]
    assert slept == pytest.approx(expected)


def test_log_probabilities_of_a_prompt_have_rows(runner: PacedRunner) -> None:
    logits = runner.forward([SequenceChunk((1, 2, 3), 0, (0,), all_logits=True), SequenceChunk((1,), 0, (1,), False)])
    assert logits.argmax(dim=1).tolist() == [answer((1, 2, 3)[:count], 1)[0] for count in (1, 2, 3)]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "truncated"),
        ('{"prefill": {}, "decode": {"row": 1}}', "row"),
        ('{"prefill": {"fixed_s": -1}, "decode": {}}', "fixed_s"),
        ('{"prefill": {}, "decode": {}, "kv_bytes": 12}', "kv_bytes 12"),
    ],
)
def test_bad_coefficients_are_refused(tmp_path: Path, content: str, problem: str) -> None:
    (tmp_path / "pace.json").write_text(content)
    with pytest.raises(ModelError, match=problem):
        Coefficients.read(tmp_path / "pace.json")
    with pytest.raises(ModelError, match="absent"):
        Coefficients.read(tmp_path / "absent")


async def ask(client: httpx.AsyncClient, prompt: list[int], num_tokens: int) -> dict[str, Any]:
    body = {"model": "paced", "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "return_token_ids": True}
    began = time.monotonic()
    reply = await client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    return {"tokens": reply.json()["choices"][0]["token_ids"], "took_s": time.monotonic() - began}


@pytest.mark.slow
@pytest.mark.e2e
def test_a_cluster_answers_at_its_pace(tmp_path: Path, forge: None) -> None:
    """2P2D behind two routers: no answer is wrong, none comes before its steps can have ended."""
    coefficients = Coefficients.read(EXAMPLE)
    file = tmp_path / "pace.json"
    slow = msgspec.structs.replace(coefficients, prefill=StepCoefficients(fixed_s=0.05, token_s=2e-4))
    file.write_bytes(msgspec.json.encode(slow))
    prompts = [[(31 * number + 7 * place) % 256 for place in range(100 + 150 * number)] for number in range(8)]

    async def asked(urls: list[str], prompts: list[list[int]]) -> list[dict[str, Any]]:
        clients = [httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) for url in urls]
        found = await asyncio.gather(*(ask(clients[number % 2], prompt, 12) for number, prompt in enumerate(prompts)))
        for client in clients:
            await client.aclose()
        return found

    def idle_workers() -> int:
        pages = [httpx.get(worker.http_url + "/metrics", trust_env=False).text for worker in stack.workers("prefill")]
        return sum("vllm:request_success_total{" not in page for page in pages)

    flags = ("--local-prefill-threshold", "0")
    with PacedStack(
        StackSettings(2, 2, routers=2, router_flags=flags, log_dir=tmp_path / "logs"), coefficients=file
    ) as stack:
        urls = [router.http_url for router in stack.routers]
        found = asyncio.run(asked(urls, prompts))
        for number in range(1, 11):  # on a busy machine prompts may come one by one, all to the same worker
            if not idle_workers():
                break
            others = [[(token + number) % 256 for token in prompt] for prompt in prompts]  # that no cache holds
            asyncio.run(asked(urls, others))
        assert not idle_workers(), "both prefill workers get prompts"
    assert [one["tokens"] for one in found] == [answer(prompt, 12) for prompt in prompts]
    for prompt, one in zip(prompts, found, strict=True):
        least_s = slow.prefill.model().seconds(StepShape.of_prompt(0, len(prompt)))
        assert one["took_s"] >= least_s + 11 * slow.decode.model().seconds(StepShape.of_rows(1, len(prompt)))
