"""Blocks of workers of different sizes: what one gathers, the other scatters, head by head."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from common.engine.kv.cache import KVCache
from common.engine.kv.quantised_staging import quantised_incoming, quantised_outgoing
from common.engine.kv.sharded_cache import ShardedCache
from common.engine.kv.staging import incoming_blocks, outgoing_blocks
from common.engine.kv.tiers.copies import copied_incoming, copied_outgoing
from common.errors import BlockError, ModelError
from common.model_files.architecture.shard import Shard
from common.model_files.config import ModelConfig, from_hf
from common.model_files.tiny import make_tiny_model

BLOCKS, BLOCK_SIZE = 6, 16


@pytest.fixture
def config(tmp_path: Path) -> ModelConfig:
    """8 heads, 4 KV heads."""
    return replace(from_hf(make_tiny_model(tmp_path / "tiny") / "config.json"), num_heads=8, num_kv_heads=4)


class RankCaches:
    """The caches of all ranks of a worker, and the one that rank 0 ships blocks of."""

    def __init__(self, config: ModelConfig, size: int, kv_dtype: str = "float32") -> None:
        self.config, self.size = config, size
        self.others = [
            KVCache(Shard(rank, size).of(config), BLOCKS, BLOCK_SIZE, kv_dtype, share=True) for rank in range(1, size)
        ]
        if size == 1:
            self.kv = KVCache(config, BLOCKS, BLOCK_SIZE, kv_dtype)
            return
        self.kv = ShardedCache(config, size, BLOCKS, BLOCK_SIZE, kv_dtype)
        for other in self.others:
            assert other.shared is not None
            self.kv.attach_file(other.shared.offer.fd)

    def write(self, index: int, whole: torch.Tensor) -> None:
        """As the steps of the ranks do: each its own heads. `whole` is uint8 [layers, KV heads, bytes]."""
        for rank, kv in enumerate((self.kv, *self.others)):
            heads = Shard(rank, self.size).kv_heads(self.config.num_kv_heads)
            bytes_of(kv, index).copy_(whole[:, heads.start : heads.stop])

    def read(self, rank: int, index: int) -> torch.Tensor:
        return bytes_of((self.kv, *self.others)[rank], index)


def bytes_of(kv: KVCache, index: int) -> torch.Tensor:
    """uint8 [layers, the rank's KV heads, bytes]."""
    block = kv.tensor[index]
    return block.view(torch.uint8).view(*block.shape[:2], -1)


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "fp8", "int8"])
@pytest.mark.parametrize(("sender", "receiver"), [(2, 1), (1, 2), (2, 2), (4, 2), (2, 8), (8, 4), (8, 8)])
def test_heads_find_their_ranks(config: ModelConfig, sender: int, receiver: int, kv_dtype: str) -> None:
    source, target = RankCaches(config, sender, kv_dtype), RankCaches(config, receiver, kv_dtype)
    assert source.kv.wire_bytes == target.kv.wire_bytes
    whole = torch.randint(0, 256, (config.num_layers, 4, source.kv.wire_bytes // config.num_layers // 4)).byte()
    source.write(3, whole)
    outgoing, incoming = outgoing_blocks(source.kv), incoming_blocks(target.kv)
    incoming.view(5)[:] = outgoing.view(3)
    incoming.commit([5])
    for rank in range(receiver):
        heads = Shard(rank, receiver).kv_heads(4)
        assert torch.equal(target.read(rank, 5), whole[:, heads.start : heads.stop])
        assert not any(target.read(rank, index).any() for index in range(BLOCKS) if index != 5)


def test_views_of_blocks_keep_their_bytes(config: ModelConfig) -> None:
    """A sender's frames point into them while later blocks are gathered."""
    caches = RankCaches(config, 2)
    for index in range(3):
        caches.write(index, torch.full((config.num_layers, 4, 2048), index + 1, dtype=torch.uint8))
    outgoing = outgoing_blocks(caches.kv)
    views = [outgoing.view(index) for index in range(3)]
    assert [set(bytes(view)) for view in views] == [{1}, {2}, {3}]


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("sender", "receiver"), [(2, 1), (1, 2), (4, 2), (8, 2)])
def test_blocks_of_8_bits_are_those_of_one_rank(config: ModelConfig, sender: int, receiver: int, kv_dtype: str) -> None:
    source, target, plain, end = (RankCaches(config, size, kv_dtype) for size in (sender, receiver, 1, 1))
    numbers = torch.randn(plain.kv.tensor.shape[1:]).to(plain.kv.dtype)
    plain.kv.tensor[3] = numbers
    source.write(3, bytes_of(plain.kv, 3).clone())
    outgoing, incoming = quantised_outgoing(source.kv), quantised_incoming(target.kv)
    sent = bytes(quantised_outgoing(plain.kv).view(3))
    assert bytes(outgoing.view(3)) == sent and len(sent) < plain.kv.block_bytes
    incoming.view(5)[:] = sent
    incoming.commit([5])
    whole = quantised_incoming(end.kv)
    whole.view(5)[:] = sent
    whole.commit([5])
    assert end.kv.tensor[5].any()
    for rank in range(receiver):
        heads = Shard(rank, receiver).kv_heads(4)
        assert torch.equal(target.read(rank, 5), bytes_of(end.kv, 5)[:, heads.start : heads.stop])


def test_unused_slots_are_cleared_on_all_ranks(config: ModelConfig) -> None:
    caches = RankCaches(config, 2)
    for index in (1, 2):
        caches.write(index, torch.full((config.num_layers, 4, 2048), 1, dtype=torch.uint8))
    caches.kv.clear_slots(1, 10)
    for rank in range(2):
        slots = caches.read(rank, 1).view(config.num_layers, 2, BLOCK_SIZE, -1)
        assert slots[:, :, :10].all() and not slots[:, :, 10:].any()
        assert caches.read(rank, 2).all()


def test_a_tier_gets_whole_blocks(config: ModelConfig) -> None:
    caches = RankCaches(config, 2)
    whole = torch.randint(0, 256, (config.num_layers, 4, 2048)).byte()
    caches.write(1, whole)
    view, into = copied_outgoing(caches.kv).view(1), copied_incoming(caches.kv)
    assert bytes(view) == whole.numpy().tobytes()
    into.view(4)[:] = view
    into.commit([4])
    assert torch.equal(caches.read(1, 4), whole[:, 2:])


def test_blocks_are_not_read_in_place(config: ModelConfig) -> None:
    kv = RankCaches(config, 2).kv
    with pytest.raises(BlockError, match="has no contiguous bytes"):
        kv.block(0)
    with pytest.raises(BlockError, match="invalid block 6: the cache has 6 blocks"):
        outgoing_blocks(kv).view(6)


def test_a_memory_that_is_too_small_is_refused(config: ModelConfig) -> None:
    small = KVCache(Shard(1, 2).of(config), BLOCKS - 1, BLOCK_SIZE, "float32", share=True)
    assert small.shared is not None
    kv = ShardedCache(config, 2, BLOCKS, BLOCK_SIZE, "float32")
    with pytest.raises(ModelError, match="the KV memory of rank 1 is smaller than 98304 bytes"):
        kv.attach_file(small.shared.offer.fd)
    with pytest.raises(ModelError, match=r"the KV cache of rank 1 is \[5, 4, 2, .* but that of rank 0 is \[6, 4, 2, "):
        kv.attach(small.tensor)
