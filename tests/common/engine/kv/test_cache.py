from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest
import torch

from common.engine.kv.cache import KVCache, block_bytes, torch_dtype
from common.engine.transfer.transports.shm import PeerMemory
from common.errors import BlockError, ModelError
from common.model_files.config import ModelConfig, from_hf
from kernels.interface.kv_region import packed, unpacked


@pytest.fixture
def config(tiny_folder: Path) -> ModelConfig:
    return from_hf(tiny_folder / "config.json")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "fp8", "int8"])
def test_a_block_is_one_range_of_bytes(config: ModelConfig, dtype: str) -> None:
    kv = KVCache(config, 5, 16, dtype)
    width = config.head_dim + (4 if dtype == "int8" else 0)
    assert kv.tensor.shape == (5, config.num_layers, config.num_kv_heads, 16, 2, width)
    assert kv.tensor.is_contiguous() and kv.block_bytes == block_bytes(config, 16, dtype)
    kv.tensor[3] = packed(torch.randn(*kv.tensor.shape[1:-1], config.head_dim), kv.dtype)
    assert bytes(kv.block(3)) == bytes(kv.tensor[3].view(torch.uint8).numpy())
    assert not any(kv.block(2)) and not any(kv.block(4))
    kv.tensor[1].copy_(kv.tensor[3])
    assert kv.block(1) == kv.block(3)
    kv.clear_slots(3, 5)
    left, whole = unpacked(kv.tensor[3]), unpacked(kv.tensor[1])
    assert not left[:, :, 5:].any() and torch.equal(left[:, :, :5], whole[:, :, :5])


def test_bytes_written_to_a_block_are_its_tensor(config: ModelConfig) -> None:
    kv = KVCache(config, 3, 16, "bfloat16")
    kv.tensor[0].normal_()
    kv.block(2)[:] = kv.block(0)
    assert torch.equal(kv.tensor[2], kv.tensor[0]) and not kv.tensor[1].any()


def test_a_shared_cache_is_read_block_by_block_by_others(config: ModelConfig) -> None:
    kv = KVCache(config, 3, 16, "float32", share=True)
    kv.tensor[1].normal_()
    assert kv.shared is not None and kv.shared.offer.num_bytes == 3 * kv.block_bytes
    peer, copy = PeerMemory(kv.shared.offer), bytearray(kv.block_bytes)
    assert peer.read(1, memoryview(copy)) and bytes(copy) == bytes(kv.block(1))
    assert not peer.read(3, memoryview(copy))
    peer.close()
    assert KVCache(config, 3, 16, "float32").shared is None


@pytest.mark.parametrize("index", [-1, 3, 2**40])
def test_blocks_out_of_range(config: ModelConfig, index: int) -> None:
    kv = KVCache(config, 3, 16, "float32")
    with pytest.raises(BlockError, match=f"invalid block {index}: the cache has 3"):
        kv.block(index)
    with pytest.raises(BlockError):
        kv.block_tensor(index)


@pytest.mark.parametrize("share", [False, True])
def test_untouched_blocks_take_no_memory(config: ModelConfig, share: bool) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    kv = KVCache(config, 2**30 // block_bytes(config, 16, "float32"), 16, "float32", share=share)
    kv.tensor[-1].normal_()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("num_blocks", [2**30, 2**45])
def test_no_room_says_what_to_lower(config: ModelConfig, num_blocks: int, share: bool) -> None:
    with pytest.raises(ModelError, match="lower kv_memory_gib"):
        KVCache(config, num_blocks, 16, "float32", share=share)


def test_a_system_without_such_memory_has_private_memory(
    config: ModelConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(os, "memfd_create")
    assert KVCache(config, 3, 16, "float32", share=True).shared is None
    assert "cannot share KV memory" in caplog.text


def test_int8_is_for_cpus(config: ModelConfig) -> None:
    """No kernel of another device knows its scales."""
    with pytest.raises(ModelError, match="on meta use auto or fp8"):
        KVCache(config, 3, 16, "int8", "meta")


def test_no_blocks(config: ModelConfig) -> None:
    with pytest.raises(ModelError, match="both must be at least 1"):
        KVCache(config, 0, 16, "float32")


def test_unknown_dtype() -> None:
    with pytest.raises(ModelError, match="float32, bfloat16"):
        torch_dtype("float16")
