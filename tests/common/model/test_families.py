"""Other families against transformers, which made their checkpoints: the same tokens, from nearly the same logits."""

from __future__ import annotations

from pathlib import Path

import pytest

from ...families import CASES
from .generation import Pool, load, logits_along, prompt, random_checkpoint, transformers_greedy, transformers_model


@pytest.mark.parametrize("name", CASES)
def test_tokens_and_logits_equal_transformers(tmp_path: Path, name: str) -> None:
    family, options = CASES[name]
    folder = random_checkpoint(tmp_path, family, **options)
    tokens, logits = transformers_greedy(transformers_model(folder), prompt(90), 24)
    model = load(folder)
    assert len(set(tokens)) > 4
    for block_size, chunk in [(16, 512), (64, 16), (16, 1)]:
        assert Pool(model, block_size=block_size).greedy(prompt(90), 24, chunk=chunk) == tokens
    assert float((logits_along(Pool(model), prompt(90), tokens) - logits).abs().max()) < 1e-3
