"""Models over several ranks, which are threads here: the tokens of transformers, whatever is split."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from common.errors import ConfigError, ModelError
from common.model.load import open_model
from common.model.safetensors_weights import SafetensorsWeights
from common.model_config.shard import Shard
from common.model_files.config import ModelConfig
from common.model_files.resolve import resolve_model
from common.ranks.load_shard import load_shard, open_for_ranks
from common.ranks.sharded_source import ShardedSource

from ...families import CASES
from .generation import Pool, files_of, prompt, random_checkpoint, transformers_greedy, transformers_model

WAIT_S = 30.0
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
}


class ThreadedRanks:
    """`Collectives` for ranks that are threads of one process; rank `rank` calls with its own `Member`."""

    def __init__(self, size: int) -> None:
        self.parts: list[Tensor | None] = [None] * size
        self.barrier = threading.Barrier(size, timeout=WAIT_S)

    def all_parts(self, rank: int, part: Tensor) -> list[Tensor]:
        self.parts[rank] = part.clone()
        self.barrier.wait()
        found = [one for one in self.parts if one is not None]
        self.barrier.wait()
        return found


class Member:
    def __init__(self, ranks: ThreadedRanks, rank: int) -> None:
        self.ranks, self.rank = ranks, rank

    def add_up(self, part: Tensor) -> Tensor:
        total, *others = self.ranks.all_parts(self.rank, part)
        for other in others:
            total = total + other
        return total

    def join(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        assert part.shape[1] == widths[self.rank]
        return torch.cat(self.ranks.all_parts(self.rank, part), 1)


def greedy_of_ranks(folder: Path, size: int, tokens: Sequence[int], count: int) -> list[list[int]]:
    """What each rank generates, in chunks."""
    ranks = ThreadedRanks(size)

    def run(rank: int) -> list[int]:
        model = load_shard(files_of(folder), Shard(rank, size), Member(ranks, rank), dtype="float32", device="cpu")
        return Pool(model).greedy(list(tokens), count, chunk=16)

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, range(size)))


@pytest.mark.parametrize("name", CASES_OF_RANKS)
def test_the_tokens_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    family, options, size = CASES_OF_RANKS[name]
    folder = random_checkpoint(tmp_path, family, **options)
    tokens, _ = transformers_greedy(transformers_model(folder), prompt(50), 12)
    assert len(set(tokens)) > 3
    assert greedy_of_ranks(folder, size, prompt(50), 12) == [tokens] * size


class Sums:
    """What a rank that only loads has in place of the others."""

    def add_up(self, part: Tensor) -> Tensor:
        return part

    def join(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        return part


def checkpoint_of(folder: Path, family: str = "Llama", **options: Any) -> tuple[ModelConfig, SafetensorsWeights]:
    config, source = open_model(files_of(random_checkpoint(folder, family, **options)))
    assert isinstance(source, SafetensorsWeights)
    return config, source


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 2}


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("Llama", {"attention_bias": True, "mlp_bias": True, "vocab_size": 301}),
        ("Phi3", {"pad_token_id": 0}),
        ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 96}),
        ("Mixtral", {"num_local_experts": 2}),
    ],
)
def test_each_number_of_a_matrix_is_one_ranks(tmp_path: Path, family: str, options: dict[str, Any]) -> None:
    """What several ranks have is what all need: norms, routers, and biases of sums, which rank 0 alone adds."""
    config, files = checkpoint_of(tmp_path, family, **options)
    ranks = [ShardedSource(files, config, Shard(rank, 2)) for rank in range(2)]
    names = sorted(files._files)
    assert len(names) > 20
    for name in names:
        whole, (first, second) = files.read(name), (rank.read(name) for rank in ranks)
        if name.endswith(("o_proj.bias", "down_proj.bias")):
            assert torch.equal(first, whole)
            assert not second.any()
        elif "norm" in name or ".gate." in name or "shared_expert_gate" in name:
            assert torch.equal(first, whole)
            assert torch.equal(second, whole)
        else:
            assert first.numel() + second.numel() == whole.numel(), name
            both = torch.cat((first.flatten(), second.flatten()))
            assert torch.equal(whole.flatten().sort().values, both.sort().values)


def test_fewer_kv_heads_than_ranks_are_read_by_several(tmp_path: Path) -> None:
    config, files = checkpoint_of(tmp_path, num_attention_heads=4, num_key_value_heads=2)
    name = "model.layers.0.self_attn.k_proj.weight"
    parts = [ShardedSource(files, config, Shard(rank, 4)).read(name) for rank in range(4)]
    for rank, part in enumerate(parts):
        assert torch.equal(part, files.read(name).chunk(2)[rank // 2])


def test_a_rank_reads_its_part_and_no_more(tmp_path: Path) -> None:
    config, files = checkpoint_of(tmp_path, intermediate_size=320, vocab_size=1000)
    whole = sum(files.read(name).nbytes for name in files._files)
    norms = sum(files.read(name).nbytes for name in files._files if "norm" in name)
    for rank in range(2):
        source = ShardedSource(files, config, Shard(rank, 2))
        for name in files._files:
            source.read(name)
        assert source.num_bytes == (whole + norms) // 2


def test_a_tensor_of_another_size_is_refused(tmp_path: Path) -> None:
    config, files = checkpoint_of(tmp_path)
    wrong = ShardedSource(files, ModelConfig(**{**fields_of(config), "num_heads": 12}), Shard(0, 2))
    with pytest.raises(ModelError, match=r"q_proj.weight is \[96, 96\], the configuration wants 192 in dimension 0"):
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
            "tensor_parallel_size=4 is refused: 1 or 2 for this model: 6 heads, 2 KV heads and MLPs of 160",
        ),
        (*CASES["deepseek-v2-lite"], 2, "tensor_parallel_size=2 is refused: 1 for a model with latent attention"),
        (*CASES["gpt-oss"], 2, "tensor_parallel_size=2 is refused: 1 for gpt-oss, whose experts lie in one tensor"),
    ],
)
def test_what_cannot_be_split_is_refused(
    tmp_path: Path, family: str, options: dict[str, Any], size: int, message: str
) -> None:
    folder = random_checkpoint(tmp_path, family, **options)
    with pytest.raises(ConfigError) as refused:
        load_shard(files_of(folder), Shard(0, size), Sums(), dtype="float32", device="cpu")
    assert str(refused.value).startswith(message)


def test_a_file_of_quantised_weights_is_refused() -> None:
    with pytest.raises(ConfigError, match="1 for a GGUF file; more for safetensors of floats"):
        open_for_ranks(resolve_model("smollm2-135m"), 2)
