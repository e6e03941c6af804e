"""Models over several ranks, which are threads here: the tokens of transformers, whatever is split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from common.engine.models.load import open_model
from common.engine.ranks.shard import ShardedSource, open_for_ranks
from common.engine.weights.safetensors_weights import SafetensorsWeights
from common.errors import ConfigError, ModelError
from common.model_files.architecture.shard import Shard
from common.model_files.config import ModelConfig
from common.model_files.quantization import Quantization

from ....families import CASES
from .generation import files_of, prompt, random_checkpoint, transformers_greedy, transformers_model
from .threaded_ranks import greedy_of_ranks

CASES_OF_RANKS = {
    "llama": ("Llama", {"num_attention_heads": 8, "num_key_value_heads": 4}, 4),
    "odd vocabulary, biases": ("Llama", {"vocab_size": 301, "attention_bias": True, "mlp_bias": True}, 2),
    "heads on two ranks each": ("Qwen2", {"num_attention_heads": 4, "num_key_value_heads": 2}, 4),
    "three ranks": ("Qwen3", {"num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 192}, 3),
    "tied": ("Llama", {"tie_word_embeddings": True}, 2),
    "mistral": ("Mistral", {"sliding_window": 20, "head_dim": 32}, 2),
    "gemma2": (*CASES["gemma2"], 2),
    "phi3": ("Phi3", {"pad_token_id": 0, "num_attention_heads": 6, "num_key_value_heads": 2}, 2),
    "mixtral": (*CASES["mixtral"], 2),
    "qwen2-moe": (*CASES["qwen2-moe"], 2),
    "gpt-oss": (*CASES["gpt-oss"], 2),
    "glm4": (*CASES["glm4"], 2),
    "glm4-moe": (*CASES["glm4-moe"], 2),
    "wide norms": (*CASES["olmo2"], 2),
    "wide norms, a key head on two ranks": (
        "Olmo2",
        {"pad_token_id": 0, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64},
        4,
    ),
    "wide norms, rotated in part": (*CASES["minimax-m2"], 2),
    "deepseek-v2": (*CASES["deepseek-v2"], 4),
    "deepseek-v2-lite": (*CASES["deepseek-v2-lite"], 2),
    "deepseek-v3": (*CASES["deepseek-v3"], 2),
    "all gates, then all ups": (*CASES["mistral4"], 2),
    "all gates, then all ups, of two files' names": (*CASES["granite-moe"], 2),
}


@pytest.mark.slow_except(
    "odd vocabulary, biases", "gemma2", "phi3", "mixtral", "qwen2-moe", "wide norms", "all gates, then all ups, *"
)
@pytest.mark.parametrize("name", CASES_OF_RANKS)
def test_the_tokens_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    family, options, size = CASES_OF_RANKS[name]
    folder = random_checkpoint(tmp_path, family, **options)
    tokens, _ = transformers_greedy(transformers_model(folder), prompt(50), 12)
    assert len(set(tokens)) > 3
    assert greedy_of_ranks(files_of(folder), size, prompt(50), 12) == [tokens] * size


def checkpoint_of(folder: Path, family: str = "Llama", **options: Any) -> tuple[ModelConfig, SafetensorsWeights]:
    config, source = open_model(files_of(random_checkpoint(folder, family, **options)))
    assert isinstance(source, SafetensorsWeights)
    return config, source


WHOLE = ("norm", ".gate.", "router", "shared_expert_gate", "q_a_proj", "kv_a_proj")
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 2}


@pytest.mark.slow_cases("GptOss-options4")
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("Llama", {"attention_bias": True, "mlp_bias": True, "vocab_size": 301}),
        ("Phi3", {"pad_token_id": 0}),
        ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 96}),
        ("Mixtral", {"num_local_experts": 2}),
        CASES["gpt-oss"],
        CASES["deepseek-v2"],
    ],
)
def test_each_number_of_a_matrix_is_one_ranks(tmp_path: Path, family: str, options: dict[str, Any]) -> None:
    """What several ranks have is what all need: norms, routers, and biases of sums, which rank 0 alone adds."""
    config, files = checkpoint_of(tmp_path, family, **options)
    ranks = [ShardedSource(files, config, Shard(rank, 2), Quantization.NONE) for rank in range(2)]
    names = sorted(files._files)
    assert len(names) > 20
    for name in names:
        whole, (first, second) = files.read(name), (rank.read(name) for rank in ranks)
        if name.endswith(("o_proj.bias", "down_proj.bias", "down_proj_bias")):
            assert torch.equal(first, whole)
            assert not second.any()
        elif any(part in name for part in WHOLE):
            assert torch.equal(first, whole)
            assert torch.equal(second, whole)
        else:
            assert first.numel() + second.numel() == whole.numel(), name
            both = torch.cat((first.flatten(), second.flatten()))
            assert torch.equal(whole.flatten().sort().values, both.sort().values)


def test_fewer_kv_heads_than_ranks_are_read_by_several(tmp_path: Path) -> None:
    config, files = checkpoint_of(tmp_path, num_attention_heads=4, num_key_value_heads=2)
    name = "model.layers.0.self_attn.k_proj.weight"
    parts = [ShardedSource(files, config, Shard(rank, 4), Quantization.NONE).read(name) for rank in range(4)]
    for rank, part in enumerate(parts):
        assert torch.equal(part, files.read(name).chunk(2)[rank // 2])


def test_a_rank_reads_its_part_and_no_more(tmp_path: Path) -> None:
    config, files = checkpoint_of(tmp_path, intermediate_size=320, vocab_size=1000)
    whole = sum(files.read(name).nbytes for name in files._files)
    norms = sum(files.read(name).nbytes for name in files._files if "norm" in name)
    for rank in range(2):
        source = ShardedSource(files, config, Shard(rank, 2), Quantization.NONE)
        for name in files._files:
            source.read(name)
        assert source.num_bytes == (whole + norms) // 2


def test_a_tensor_of_another_size_is_refused(tmp_path: Path) -> None:
    config, files = checkpoint_of(tmp_path)
    wrong = ShardedSource(files, ModelConfig(**{**fields_of(config), "num_heads": 12}), Shard(0, 2), Quantization.NONE)
    with pytest.raises(
        ModelError, match=r"q_proj.weight has shape \[96, 96\], the configuration requires 192 in dimension 0"
    ):
        wrong.read("model.layers.0.self_attn.q_proj.weight")


def fields_of(config: ModelConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.__slots__}


@pytest.mark.parametrize(
    ("family", "options", "size", "message"),
    [
        (
            "Llama",
            {},
            4,
            "invalid tensor_parallel_size=4: must be 1 or 2 for this model: 6 heads, 2 KV heads and MLP widths 160",
        ),
        (
            *CASES["deepseek-v3"],
            3,
            "invalid tensor_parallel_size=3: must be 1, 2 or 4 for this model: 4 heads, 1 KV heads",
        ),
    ],
)
def test_what_cannot_be_split_is_refused(
    tmp_path: Path, family: str, options: dict[str, Any], size: int, message: str
) -> None:
    folder = random_checkpoint(tmp_path, family, **options)
    with pytest.raises(ConfigError) as refused:
        open_for_ranks(files_of(folder), size)
    assert str(refused.value).startswith(message)
