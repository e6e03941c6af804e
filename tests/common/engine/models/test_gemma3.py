"""Gemma 3 against transformers: the same tokens, from nearly the same logits, within and beyond the sliding window."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from common.engine.models.load import load_model
from common.model_files.files import ModelFiles
from common.model_files.tiny import make_tiny_model
from common.model_files.tokenizer import Tokenizer

from .generation import Pool, load, logits_along, prompt, transformers_greedy, transformers_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("gemma") / "tiny", architecture="gemma3")


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 16, 64, 512])
@pytest.mark.parametrize("block_size", [16, 64])
def test_chunks_and_blocks(folder: Path, chunk: int, block_size: int) -> None:
    tokens, logits = transformers_greedy(transformers_model(folder), prompt(130), 40)
    pool = Pool(load(folder), block_size=block_size)
    assert pool.greedy(prompt(130), 40, chunk=chunk) == tokens
    assert float((logits_along(pool, prompt(130), tokens) - logits).abs().max()) < 1e-3


def test_softcaps(tmp_path: Path) -> None:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=260, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=1, head_dim=16, sliding_window=24, query_pre_attn_scalar=32, sliding_window_pattern=2,
        final_logit_softcapping=5.0, max_position_embeddings=512, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    Gemma3ForCausalLM(config).save_pretrained(tmp_path)
    other = transformers_model(tmp_path)
    tokens, logits = transformers_greedy(other, prompt(50), 12)
    found = logits_along(Pool(load(tmp_path)), prompt(50), tokens)
    assert float((found - logits).abs().max()) < 1e-3 and float(found.abs().max()) < 5.0


@pytest.mark.timeout(600)  # two implementations in float32, beside other tests
@pytest.mark.slow
def test_gemma3_270m_equals_transformers(gemma3_files: ModelFiles) -> None:
    tokenizer, (path,) = Tokenizer.from_file(gemma3_files.tokenizer), gemma3_files.weights
    model, other = load_model(gemma3_files, dtype="float32"), transformers_model(path.parent, path.name)
    for text in ("The capital of France is", "Once upon a time, " * 130):  # beyond the window of 512
        ids = tokenizer.encode(text)
        tokens, logits = transformers_greedy(other, ids, 16)
        assert Pool(model).greedy(ids, 16, chunk=100) == tokens
        assert float((logits_along(Pool(model, block_size=64), ids, tokens) - logits).abs().max()) < 1e-3
