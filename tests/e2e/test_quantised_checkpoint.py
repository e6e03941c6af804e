"""Quantised checkpoints served by both pools: the tokens of the floats that they stand for, and of their own integers.

Of each format one test compares with transformers, which reads the floats, and others with a loop in this process over
the same integers, which the workers multiply as they do with `--quantization auto`.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf.constants import GGMLQuantizationType

from common.engine.models.decoder import Decoder
from common.engine.models.load import load_model
from common.model_files.resolve import resolve_model

from ..common.engine.models.generation import Pool, random_checkpoint, transformers_greedy, transformers_model
from ..common.engine.models.gguf_checkpoint import write_gguf
from ..common.engine.models.mxfp4_checkpoint import write_mxfp4
from ..common.engine.weights.formats.checkpoints import FORMATS, write_checkpoint
from .test_failures import ALL_REMOTE, NUM_TOKENS, SLOW_PREFILL, run_with

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600), pytest.mark.slow]
LENGTHS = (5, 33, 66, 70, 81, 96, 97, 130)
SHORT_TOKENS = 40
NUM_BLOCKS = 12
"""The longest prompt and its short answer fill 11 of them, so two that overlap are too many."""
KILLED_LENGTHS = (200, 700, 900, 1500)
KILLED_BLOCKS = 140
"""The longest prompt and its answer fill 119 of them, all four 308, so the worker that is left preempts."""
LOOP_BLOCKS = 128
LAYOUTS = ("gptq act order", "w8a8 by channel", "fp8 by block")
"""One of each width of integers, and floats; tests/common/engine/weights/formats has every layout."""
Q4_K, Q6_K = GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q6_K
MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down", "output")
MIXES = {"q4_k_m": dict.fromkeys(MATRICES, Q4_K) | dict.fromkeys(("attn_v", "ffn_down", "output"), Q6_K)}
"""Of GGUF files, by names of matrices; as llama.cpp mixes them."""
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_hidden_layers": 2}
"""256 divides each row."""


@dataclass(frozen=True)
class Checkpoint:
    """What the workers serve, and transformers' model of the floats that it stands for."""

    model: Path
    floats: Any

    @functools.cached_property
    def integers(self) -> Decoder:
        """The model with the integers that the workers keep, in this process."""
        return load_model(resolve_model(str(self.model)), quantization="auto")

    @torch.inference_mode()
    def greedy_in_integers(self, prompts: Sequence[list[int]], count: int) -> list[list[int]]:
        """`count` tokens after each prompt, one prompt after the other."""
        return [Pool(self.integers, num_blocks=LOOP_BLOCKS).greedy(prompt, count) for prompt in prompts]


@pytest.fixture(scope="module", params=[*LAYOUTS, "mxfp4", *MIXES])
def checkpoint(
    request: pytest.FixtureRequest, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Checkpoint:
    root, name = tmp_path_factory.mktemp("checkpoints"), str(request.param)
    if name in MIXES:
        dense = random_checkpoint(root / "dense", "Llama", **WIDE)
        model = write_gguf(dense, root / f"{name}.gguf", "llama", MIXES[name])
        return Checkpoint(model, transformers_model(root, model.name))
    if name == "mxfp4":
        dense, model = write_mxfp4(root)
        for file in tiny_folder.glob("tokenizer*.json"):
            shutil.copy(file, model)
    else:
        model = root / name.replace(" ", "-")
        dense = write_checkpoint(tiny_folder, model, FORMATS[name])
    return Checkpoint(model, transformers_model(dense))


def check_hits_and_preemption(system: Any, prompts: list[list[int]], expected: list[list[int]]) -> None:
    """Twice, so that prefixes are cached on both sides; and with so few blocks that sequences are preempted."""
    assert len({token for tokens in expected for token in tokens}) > 4
    for _ in range(2):
        assert system.generate(prompts, max_tokens=SHORT_TOKENS) == expected
    assert system.metric("vllm:num_preemptions", "decode") > 0
    assert system.metric("vllm:prefix_cache_hits", "prefill") > 0
    skipped = system.metric("diptych_kv_blocks_skipped", "decode")
    for _ in range(2):
        assert system.generate(prompts[-1:], max_tokens=SHORT_TOKENS) == expected[-1:]
    assert system.metric("diptych_kv_blocks_skipped", "decode") > skipped


def few_blocks(system_of: Any, checkpoint: Checkpoint, quantization: str) -> Any:
    flags = ("--num-blocks", str(NUM_BLOCKS), "--watermark", "0")
    return system_of(
        model=str(checkpoint.model), quantization=quantization, router_flags=ALL_REMOTE, decode_flags=flags
    )


def test_tokens_equal_those_of_the_floats(system_of: Any, random_prompts: Any, checkpoint: Checkpoint) -> None:
    prompts = random_prompts(LENGTHS, vocab_size=256, seed=23)
    expected = [transformers_greedy(checkpoint.floats, prompt, SHORT_TOKENS)[0] for prompt in prompts]
    check_hits_and_preemption(few_blocks(system_of, checkpoint, "none"), prompts, expected)


def test_tokens_equal_those_of_the_integers_that_are_kept(
    system_of: Any, random_prompts: Any, checkpoint: Checkpoint
) -> None:
    prompts = random_prompts(LENGTHS, vocab_size=256, seed=24)
    expected = checkpoint.greedy_in_integers(prompts, SHORT_TOKENS)
    check_hits_and_preemption(few_blocks(system_of, checkpoint, "auto"), prompts, expected)


@pytest.fixture(scope="module")
def long_answers(random_prompts: Any, checkpoint: Checkpoint) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts, and the tokens after each."""
    prompts = random_prompts(KILLED_LENGTHS, vocab_size=256, seed=25)
    return prompts, checkpoint.greedy_in_integers(prompts, NUM_TOKENS)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_killed_worker_costs_no_token(
    system_of: Any, checkpoint: Checkpoint, long_answers: tuple[list[list[int]], list[list[int]]], role: str
) -> None:
    """Sequences go on at the worker that is left, which computes them anew."""
    system = system_of(
        *(2, 2),
        model=str(checkpoint.model),
        quantization="auto",
        router_flags=ALL_REMOTE,
        prefill_flags=SLOW_PREFILL,
        decode_flags=("--num-blocks", str(KILLED_BLOCKS), "--watermark", "0"),
    )
    prompts, expected = long_answers
    victim = system.stack.workers(role)[0]
    got = run_with(system, prompts, victim, victim.kill, cache_salt=role)
    system.stack.restart(victim)
    system.wait_for_workers()
    assert got == expected
