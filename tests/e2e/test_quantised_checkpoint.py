"""Quantised checkpoints served by both pools: tokens are those of transformers over the floats that they stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from common.model.load import load_model

from ..common.model.generation import Pool, files_of, transformers_greedy, transformers_model
from ..common.weight_formats.checkpoints import FORMATS, write_checkpoint

pytestmark = pytest.mark.e2e
LENGTHS = (5, 33, 100, 250)
NUM_TOKENS = 12
THROUGH_BOTH = ("--local-prefill-threshold", "0")


@pytest.fixture(scope="module", params=["awq", "fp8 by block"])
def checkpoint(request: pytest.FixtureRequest, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints") / str(request.param).replace(" ", "-")
    write_checkpoint(tiny_folder, folder, FORMATS[request.param])
    return folder


def test_answers_of_a_quantised_checkpoint(system_of: Any, random_prompts: Any, checkpoint: Path) -> None:
    prompts = random_prompts(LENGTHS, vocab_size=256, seed=23)
    floats = transformers_model(checkpoint.with_name(f"{checkpoint.name}-dense"))
    system = system_of(model=str(checkpoint), router_flags=THROUGH_BOTH)
    expected = [transformers_greedy(floats, prompt, NUM_TOKENS)[0] for prompt in prompts]
    assert system.generate(prompts, max_tokens=NUM_TOKENS) == expected
    # Again: prefixes are in both caches.
    assert system.generate(prompts, max_tokens=NUM_TOKENS) == expected
    assert system.metric("diptych_kv_blocks_skipped", "decode") > 0


@torch.inference_mode()
def test_answers_of_integers_that_are_kept(system_of: Any, random_prompts: Any, checkpoint: Path) -> None:
    prompts = random_prompts(LENGTHS, vocab_size=256, seed=24)
    model = load_model(files_of(checkpoint), quantization="auto")
    system = system_of(model=str(checkpoint), quantization="auto", router_flags=THROUGH_BOTH)
    expected = [Pool(model).greedy(prompt, NUM_TOKENS) for prompt in prompts]
    assert system.generate(prompts, max_tokens=NUM_TOKENS) == expected
