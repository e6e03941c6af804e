"""Each family through two pools in float32: the greedy tokens of transformers, which made the checkpoint."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from common.model_files.resolve import resolve_model

from ..common.engine.models.generation import random_checkpoint, transformers_model
from ..common.engine.models.test_llama import CASES as LLAMA_CASES
from ..families import CASES as OTHER_CASES
from .conftest import Oracle
from .test_failures import SLOW_PREFILL, run_with

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
ALL_REMOTE = ("--local-prefill-threshold", "0")
CASES = {
    name: (LLAMA_CASES | OTHER_CASES)[name]
    for name in (
        *("qwen2-window", "qwen3", "gemma2", "phi3", "olmo3", "exaone4"),
        *("mixtral-window", "qwen2-moe", "gpt-oss", "glm4-moe", "granite-moe", "deepseek-v3"),
    )
}
"""One of each kind of attention, norms, positions and experts: the tests of `common/engine/models` have every family.

Llama itself and Mistral go through two pools in other files.
"""
LENGTHS = (66, 70, 81, 96, 97, 130)
"""Beyond the windows, and beyond where the factors of LongRoPE change in transformers."""
NUM_TOKENS = 40
KILLED_TOKENS = 60
"""Of an answer that is compared; more are generated while a worker is killed."""
NUM_BLOCKS = 12
"""The longest prompt and its answer fill 11 of them, so two that overlap are too many."""
WINDOWED_BLOCKS = {"mixtral-window": 9}
"""Where every layer sees through a window, a sequence has few at a time."""
KILLED = {"gpt-oss": "prefill", "glm4-moe": "decode", "gemma2": "decode"}
"""The victim's role by family: two kinds of experts; sinks, windows and YaRN; softcaps and norms after each part."""


@pytest.fixture
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A checkpoint of a family, with the tokenizer of the tiny model."""
    family, options = CASES[request.param]
    made = random_checkpoint(tmp_path / request.param, family, **options)
    for file in resolve_model("tiny-random").tokenizer.parent.glob("tokenizer*.json"):
        shutil.copy(file, made)
    return made


@pytest.mark.parametrize("folder", CASES, indirect=True)
def test_tokens_equal_transformers(system_of: Any, random_prompts: Any, folder: Path) -> None:
    """Twice, so that prefixes are cached on both sides; and with so few blocks that sequences are preempted."""
    oracle = Oracle(transformers_model(folder))
    prompts = random_prompts(LENGTHS, vocab_size=256, seed=21)
    expected = [oracle.greedy(prompt, NUM_TOKENS) for prompt in prompts]
    system = system_of(
        model=str(folder),
        router_flags=ALL_REMOTE,
        decode_flags=("--num-blocks", str(WINDOWED_BLOCKS.get(folder.name, NUM_BLOCKS)), "--watermark", "0"),
    )
    for _ in range(2):
        assert system.generate(prompts, max_tokens=NUM_TOKENS) == expected
    assert system.metric("vllm:num_preemptions", "decode") > 0
    assert system.metric("vllm:prefix_cache_hits", "prefill") > 0


@pytest.mark.parametrize(("folder", "role"), KILLED.items(), indirect=["folder"])
def test_a_killed_worker_costs_no_token(system_of: Any, random_prompts: Any, folder: Path, role: str) -> None:
    """Experts choose the same for a sequence that goes on at another worker, whatever rows are beside it there."""
    system = system_of(2, 2, model=str(folder), router_flags=ALL_REMOTE, prefill_flags=SLOW_PREFILL)
    prompts = random_prompts((30, 200, 500, 900), vocab_size=256, seed=3)
    expected = system.generate(prompts, max_tokens=KILLED_TOKENS)
    oracle = Oracle(transformers_model(folder))
    assert expected[0] == oracle.greedy(prompts[0], KILLED_TOKENS)
    victim = system.stack.workers(role)[0]
    got = run_with(system, prompts, victim, victim.kill, cache_salt=role)
    system.stack.restart(victim)
    assert [tokens[:KILLED_TOKENS] for tokens in got] == expected
    system.stack.wait_ready(time.monotonic() + 60)
