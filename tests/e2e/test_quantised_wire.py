"""Blocks that travel in 8 bits: answers are those of a plain loop whose prompt's blocks went through that format."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from common.engine.kv.cache import KVCache
from common.engine.models.batch import SequenceChunk
from common.engine.models.load import load_model
from common.engine.run.runner import ModelRunner
from common.model_files.resolve import resolve_model
from kernels import gather_blocks, scatter_blocks

from ..rig import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
LENGTHS = (5, 16, 17, 33, 100, 250, 400)
NUM_TOKENS = 12
BLOCK_SIZE = 16
FP8 = ("--kv-wire-dtype", "fp8", "--max-num-batched-tokens", "64")


@torch.inference_mode()
def quantised_answer(prompt: list[int], *, quantised: bool = True) -> list[int]:
    """Greedy tokens; the first is computed before the prompt's blocks are quantised, as a prefill worker does."""
    model = load_model(resolve_model("tiny-random"))
    blocks = range(-(-(len(prompt) + NUM_TOKENS) // BLOCK_SIZE))
    kv = KVCache(model.config, len(blocks), BLOCK_SIZE, "float32")
    runner = ModelRunner(model, kv)
    out = [int(runner.forward([SequenceChunk(prompt, 0, blocks)])[0].argmax())]
    ids = torch.arange(-(-len(prompt) // BLOCK_SIZE))
    scatter_blocks(gather_blocks(kv.tensor, ids, quantised=quantised), kv.tensor, ids, quantised=quantised)
    while len(out) < NUM_TOKENS:
        chunk = SequenceChunk(out[-1:], len(prompt) + len(out) - 1, blocks)
        out.append(int(runner.forward([chunk])[0].argmax()))
    return out


TWO = ("--tensor-parallel-size", "2")


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [((), ()), (TWO, ()), ((), TWO)],
    ids=["P1-D1", "P2-D1", "P1-D2"],
)
def test_answers_of_quantised_blocks(
    system_of: Any, tiny_oracle: Any, random_prompts: Any, prefill: tuple[str, ...], decode: tuple[str, ...]
) -> None:
    prompts = random_prompts(LENGTHS, vocab_size=256, seed=21)
    expected = [quantised_answer(prompt) for prompt in prompts]
    native = [tiny_oracle.greedy(prompt, NUM_TOKENS) for prompt in prompts]
    assert [quantised_answer(prompt, quantised=False) for prompt in prompts] == native
    system = system_of(
        prefill_flags=(*FP8, *prefill),
        decode_flags=decode,
        worker_flags=("--kv-transport", "tcp"),
        router_flags=("--local-prefill-threshold", "0"),
    )
    assert system.generate(prompts, max_tokens=NUM_TOKENS, at_once=1) == expected
    shipped = system.metric("diptych_kv_transfer_bytes", "decode")
    kv = KVCache(load_model(resolve_model("tiny-random")).config, 1, BLOCK_SIZE, "float32")
    num_blocks = sum(-(-length // BLOCK_SIZE) for length in LENGTHS)
    assert 0 < shipped < 0.27 * num_blocks * kv.block_bytes
    wait_until(lambda: system.metric("diptych_kv_transfer_bytes", "prefill") == shipped, "both sides count the same")
    # Again: blocks that arrived quantised are cached on the decode worker, and used as they are.
    assert system.generate(prompts, max_tokens=NUM_TOKENS, at_once=8) == expected
    assert system.metric("diptych_kv_blocks_skipped", "decode") > 0
    assert system.transfers("tcp") == 2 * len(prompts)


@pytest.mark.parametrize("transport", ["shm"])
def test_shared_memory_stays_exact(system_of: Any, tiny_oracle: Any, random_prompts: Any, transport: str) -> None:
    """It is offered beside, and wins: there are no bytes to save."""
    system = system_of(prefill_flags=FP8, router_flags=("--local-prefill-threshold", "0"))
    prompts = random_prompts((40, 130, 260), vocab_size=256, seed=22)
    got = system.generate(prompts, max_tokens=NUM_TOKENS)
    assert got == [tiny_oracle.greedy(prompt, NUM_TOKENS) for prompt in prompts]
    assert system.transfers(transport) == len(prompts) and system.transfers("tcp") == 0
