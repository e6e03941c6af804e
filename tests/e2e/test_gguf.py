"""GGUF files of mixtures of experts through two pools: the greedy tokens of transformers, which made the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gguf.constants import GGMLQuantizationType

from ..common.engine.models.generation import random_checkpoint, transformers_model
from ..common.engine.models.gguf_checkpoint import GGUF_CASES, write_gguf
from ..families import CASES
from .conftest import Oracle

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
NUM_TOKENS = 30


@pytest.mark.parametrize(("name", "split"), [("qwen3-moe", 9), ("gpt-oss", 0)])
def test_tokens_equal_transformers(system_of: Any, random_prompts: Any, tmp_path: Path, name: str, split: int) -> None:
    """Twice, so that prefixes are cached on both sides; one of the models in several files."""
    (family, options), (architecture, changes, more) = CASES[name], GGUF_CASES[name]
    folder = random_checkpoint(tmp_path / "dense", family, **options | changes)
    write_gguf(folder, tmp_path / "model.gguf", architecture, GGMLQuantizationType.F32, split=split, **more)
    (first, *_) = sorted(tmp_path.glob("*.gguf"))
    oracle = Oracle(transformers_model(folder))
    prompts = random_prompts((66, 81, 97), vocab_size=256, seed=21)
    expected = [oracle.greedy(prompt, NUM_TOKENS) for prompt in prompts]
    system = system_of(model=str(first), router_flags=("--local-prefill-threshold", "0"))
    for _ in range(2):
        assert system.generate(prompts, max_tokens=NUM_TOKENS) == expected
    assert system.metric("vllm:prefix_cache_hits", "prefill") > 0
