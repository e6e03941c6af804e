from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch

from diptych.common.errors import BlockError, ModelError
from diptych.common.model.config import ModelConfig, from_hf
from diptych.common.model.kv_cache import KVCache, block_bytes, torch_dtype


@pytest.fixture
def config(tiny_folder: Path) -> ModelConfig:
    return from_hf(tiny_folder / "config.json")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_block_is_one_range_of_bytes(config: ModelConfig, dtype: str) -> None:
    kv = KVCache(config, 5, 16, dtype)
    assert kv.tensor.shape == (5, config.num_layers, config.num_kv_heads, 16, 2, config.head_dim)
    assert kv.tensor.is_contiguous() and kv.block_bytes == block_bytes(config, 16, dtype)
    kv.tensor[3].normal_()
    assert bytes(kv.block(3)) == bytes(kv.tensor[3].view(torch.uint8).numpy())
    assert not any(kv.block(2)) and not any(kv.block(4))


def test_bytes_written_to_a_block_are_its_tensor(config: ModelConfig) -> None:
    kv = KVCache(config, 3, 16, "bfloat16")
    kv.tensor[0].normal_()
    kv.block(2)[:] = kv.block(0)
    assert torch.equal(kv.tensor[2], kv.tensor[0]) and not kv.tensor[1].any()


def test_copy_block(config: ModelConfig) -> None:
    kv = KVCache(config, 3, 16, "float32")
    kv.tensor[0].normal_()
    kv.copy_block(0, 1)
    assert torch.equal(kv.tensor[1], kv.tensor[0])


@pytest.mark.parametrize("index", [-1, 3, 2**40])
def test_blocks_out_of_range(config: ModelConfig, index: int) -> None:
    kv = KVCache(config, 3, 16, "float32")
    with pytest.raises(BlockError, match=f"block {index} is not one of 3"):
        kv.block(index)
    with pytest.raises(BlockError):
        kv.copy_block(0, index)


def test_untouched_blocks_take_no_memory(config: ModelConfig) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    kv = KVCache(config, 2**30 // block_bytes(config, 16, "float32"), 16, "float32")
    kv.tensor[-1].normal_()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024


def test_no_room_says_what_to_lower(config: ModelConfig) -> None:
    with pytest.raises(ModelError, match="lower kv_memory_gib"):
        KVCache(config, 2**45, 16, "float32")


def test_no_blocks(config: ModelConfig) -> None:
    with pytest.raises(ModelError, match="raise num_blocks"):
        KVCache(config, 0, 16, "float32")


def test_unknown_dtype() -> None:
    with pytest.raises(ModelError, match="float32, bfloat16"):
        torch_dtype("float16")
