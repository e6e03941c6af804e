"""Llama, Mistral, Qwen2 and Qwen3 against transformers: the same tokens, from nearly the same logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.engine.models.load import load_model
from common.model_files.files import ModelFiles
from common.model_files.tokenizer import Tokenizer

from .generation import Pool, load, logits_along, prompt, random_checkpoint, transformers_greedy, transformers_model

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 6}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
    "llama-rope-llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-rope-linear": ("Llama", {"rope_parameters": LINEAR}),
    "llama-head-dim": ("Llama", {"head_dim": 24}),
    "mistral-window": ("Mistral", {"sliding_window": 20, "head_dim": 32}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 17, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
}


@pytest.fixture(scope="module")
def make_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    def make(name: str) -> Path:
        family, options = CASES[name]
        return random_checkpoint(tmp_path_factory.mktemp("models") / name, family, **options)

    return make


@pytest.mark.slow_cases("qwen2", "qwen2-window", "qwen3")
@pytest.mark.parametrize("name", CASES)
def test_tokens_and_logits_equal_transformers(make_folder: Callable[[str], Path], name: str) -> None:
    folder = make_folder(name)
    tokens, logits = transformers_greedy(transformers_model(folder), prompt(90), 24)
    model = load(folder)
    assert len(set(tokens)) > 4
    for block_size, chunk in [(16, 512), (64, 16), (16, 1)]:
        assert Pool(model, block_size=block_size).greedy(prompt(90), 24, chunk=chunk) == tokens
    assert float((logits_along(Pool(model), prompt(90), tokens) - logits).abs().max()) < 1e-3


@pytest.mark.quick_cover(1)
@pytest.mark.slow_cases("16-1", "64-64")
@pytest.mark.parametrize("chunk", [1, 16, 64, 512])
@pytest.mark.parametrize("block_size", [16, 64])
def test_chunks_and_blocks(tiny_folder: Path, chunk: int, block_size: int) -> None:
    tokens, _ = transformers_greedy(transformers_model(tiny_folder), prompt(130), 40)
    assert Pool(load(tiny_folder), block_size=block_size).greedy(prompt(130), 40, chunk=chunk) == tokens


@pytest.mark.slow
@pytest.mark.timeout(600)  # two implementations in float32, beside other tests
def test_smollm2_equals_transformers(smollm2_files: ModelFiles) -> None:
    tokenizer, (path,) = Tokenizer.from_file(smollm2_files.tokenizer), smollm2_files.weights
    model, other = load_model(smollm2_files, dtype="float32"), transformers_model(path.parent, path.name)
    for text in ("The capital of France is", "def quicksort(xs):\n", "Once upon a time, " * 60):
        ids = tokenizer.encode(text)
        tokens, logits = transformers_greedy(other, ids, 24)
        assert Pool(model).greedy(ids, 24, chunk=100) == tokens
        assert float((logits_along(Pool(model, block_size=64), ids, tokens) - logits).abs().max()) < 1e-3
