"""KV caches of 8 bits in both pools: one plain loop's answers, whoever computes them and whatever happens."""

from __future__ import annotations

import os
from typing import Any

import httpx
import pytest
import torch

from common.engine.kv.cache import KVCache
from common.engine.models.batch import SequenceChunk
from common.engine.models.load import load_model
from common.engine.run.runner import ModelRunner
from common.model_files.resolve import resolve_model

from ..rig import wait_until
from .test_failures import ALL_REMOTE, NUM_TOKENS, SLOW_PREFILL, random_order, run_with

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
DEVICE = os.environ.get("DIPTYCH_DEVICE", "cpu")
INT8 = pytest.param("int8", marks=pytest.mark.skipif(DEVICE != "cpu", reason="for CPUs alone"))
LENGTHS = (5, 16, 17, 33, 100, 250, 400)
BLOCK_SIZE = 16


@torch.inference_mode()
def plain_answer(prompt: list[int], count: int, kv_dtype: str) -> list[int]:
    """Greedy tokens of one sequence in one process, a token a step."""
    model = load_model(resolve_model("tiny-random"), device=DEVICE)
    blocks = range(-(-(len(prompt) + count) // BLOCK_SIZE))
    runner = ModelRunner(model, KVCache(model.config, len(blocks), BLOCK_SIZE, kv_dtype, DEVICE))
    out = [int(runner.forward([SequenceChunk(prompt, 0, blocks)])[0].argmax())]
    while len(out) < count:
        out.append(int(runner.forward([SequenceChunk(out[-1:], len(prompt) + len(out) - 1, blocks)])[0].argmax()))
    return out


@pytest.mark.parametrize("kv_dtype", ["fp8", INT8])
@pytest.mark.parametrize(
    ("shape", "transport"),
    [
        ((1, 1), "tcp"),
        ((1, 1), "shm"),
        pytest.param((0, 1), "tcp", marks=pytest.mark.slow),
        pytest.param((2, 2), "shm", marks=pytest.mark.slow),
    ],
)
def test_the_same_answer_everywhere(
    system_of: Any, random_prompts: Any, shape: tuple[int, int], transport: str, kv_dtype: str
) -> None:
    prompts = random_prompts(LENGTHS, vocab_size=256, seed=31)
    expected = [plain_answer(prompt, 24, kv_dtype) for prompt in prompts]
    assert expected != [plain_answer(prompt, 24, "float32") for prompt in prompts], "8 bits would not be seen"
    flags = ("--kv-cache-dtype", kv_dtype, "--kv-transport", transport)
    system = system_of(*shape, router_flags=ALL_REMOTE, worker_flags=flags)
    assert system.generate(prompts, max_tokens=24, at_once=1) == expected
    shipped = system.metric("diptych_kv_transfer_bytes", "decode")
    assert system.generate(prompts, max_tokens=24, at_once=8) == expected  # what was cached is what was computed
    if shape == (1, 1):
        config = load_model(resolve_model("tiny-random")).config
        width = 2 * (config.head_dim + (4 if kv_dtype == "int8" else 0))
        num_slots = BLOCK_SIZE * sum(-(-length // BLOCK_SIZE) for length in LENGTHS)
        assert shipped == num_slots * config.num_layers * config.num_kv_heads * width
        assert system.transfers(transport) == 2 * len(prompts)


@pytest.mark.parametrize("kv_dtype", [pytest.param("fp8", marks=pytest.mark.slow), INT8])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_killed_worker_costs_no_token(system_of: Any, random_prompts: Any, role: str, kv_dtype: str) -> None:
    """An answer that moves is computed anew in the same 8 bits, and goes on with the same words."""
    system = system_of(
        2, 2, router_flags=ALL_REMOTE, worker_flags=("--kv-cache-dtype", kv_dtype), prefill_flags=SLOW_PREFILL
    )
    prompts = random_prompts((30, 200, 700, 1500) * 3, vocab_size=256, seed=32)
    expected = system.generate(prompts, max_tokens=NUM_TOKENS)
    victim = system.stack.workers(role)[0]
    got = run_with(system, random_order(prompts), victim, victim.kill, cache_salt=role)
    system.stack.restart(victim)
    assert got == random_order(expected)


def test_pools_of_two_types_are_not_paired(system_of: Any, random_prompts: Any) -> None:
    """Nothing is shipped that the other side would read as something else; prompts are computed where they decode."""
    system = system_of(router_flags=ALL_REMOTE, decode_flags=("--kv-cache-dtype", "fp8"))
    prompts = random_prompts(LENGTHS, vocab_size=256, seed=33)
    assert system.generate(prompts, max_tokens=12) == [plain_answer(prompt, 12, "fp8") for prompt in prompts]
    assert system.transfers("tcp") == system.transfers("shm") == 0
    wait_until(lambda: unpaired(system) == 2, "the router says that both have no partner")
    wait_until(lambda: 'cache_dtype="float32"' in metrics_of(system, "prefill"), "the prefill worker tells its type")
    assert 'cache_dtype="fp8"' in metrics_of(system, "decode")


def unpaired(system: Any) -> float:
    page = httpx.get(f"{system.stack.url}/metrics", timeout=30, trust_env=False).text
    return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith("diptych_unpaired_workers{"))


def metrics_of(system: Any, role: str) -> str:
    (worker,) = system.stack.workers(role)
    return httpx.get(f"{worker.http_url}/metrics", timeout=30, trust_env=False).text
