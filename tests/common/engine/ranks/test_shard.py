"""Which heads, rows and columns a rank has. Pure."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.model_files.architecture.shard import Shard, allowed_sizes, check_size, kv_owners
from common.model_files.config import ModelConfig, from_hf
from common.model_files.tiny import make_tiny_model


@pytest.fixture
def config(tmp_path: Path) -> ModelConfig:
    """4 heads, 2 KV heads, MLPs of 160."""
    return from_hf(make_tiny_model(tmp_path / "tiny") / "config.json")


@pytest.mark.parametrize("total", [1, 2, 5, 261, 300])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_parts_cover_all_rows_once(total: int, size: int) -> None:
    parts = [Shard(rank, size).part(total) for rank in range(size)]
    assert list(chain(*parts)) == list(range(total))
    assert Shard(0, size).widths(total) == [len(part) for part in parts]
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize(
    ("total", "size", "heads"),
    [
        (8, 2, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (4, 4, [[0], [1], [2], [3]]),
        (2, 4, [[0], [0], [1], [1]]),
        (1, 3, [[0], [0], [0]]),
    ],
)
def test_kv_heads_of_ranks(total: int, size: int, heads: list[list[int]]) -> None:
    assert [list(Shard(rank, size).kv_heads(total)) for rank in range(size)] == heads


@pytest.mark.parametrize(("total", "size"), [(8, 2), (4, 4), (2, 4), (1, 3), (6, 3), (2, 8)])
def test_each_kv_head_is_read_from_one_rank_that_has_it(total: int, size: int) -> None:
    owners = kv_owners(total, size)
    assert list(chain(*owners)) == list(range(total))
    for rank, owned in enumerate(owners):
        assert set(owned) <= set(Shard(rank, size).kv_heads(total))


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(8, 4, 2), (8, 2, 4), (12, 3, 6), (4, 4, 4)])
def test_query_heads_stay_with_their_kv_head(heads: int, kv_heads: int, size: int) -> None:
    for rank in range(size):
        shard = Shard(rank, size)
        group = len(shard.part(heads)) // len(shard.kv_heads(kv_heads))
        for place, head in enumerate(shard.part(heads)):
            assert shard.kv_heads(kv_heads)[place // group] == head // (heads // kv_heads)


def test_the_configuration_of_a_rank(config: ModelConfig) -> None:
    two, four = Shard(1, 2).of(config), Shard(3, 4).of(config)
    assert (two.num_heads, two.num_kv_heads, two.intermediate_size) == (2, 1, 80)
    assert (four.num_heads, four.num_kv_heads, four.intermediate_size) == (1, 1, 40)
    assert two.vocab_size == config.vocab_size
    assert Shard(0, 1).of(config) == config


def test_sizes_that_a_model_takes(config: ModelConfig) -> None:
    assert allowed_sizes(config) == [1, 2, 4]
    for size in (1, 2, 4):
        check_size(config, size)
    with pytest.raises(ConfigError) as refused:
        check_size(config, 3)
    assert str(refused.value) == (
        "invalid tensor_parallel_size=3: must be 1, 2 or 4 for this model: 4 heads, 2 KV heads and MLP widths 160 "
        "must be divisible by the number of ranks"
    )
    assert allowed_sizes(replace(config, num_heads=6, num_kv_heads=3, intermediate_size=96)) == [1, 3, 6]
