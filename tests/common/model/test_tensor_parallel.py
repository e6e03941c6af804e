"""Models over several ranks, which are threads here: the tokens of transformers, whatever is split and whatever is not."""

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
from common.model.load_shard import load_shard, open_for_ranks
from common.model.safetensors_weights import SafetensorsWeights
from common.model.sharded_source import ShardedSource
from common.model.tensor_parallel import padded
from common.model_files.config import ModelConfig
from common.model_files.shard import Shard, allowed_sizes, kv_owners

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
