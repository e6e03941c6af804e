"""Blocks that pass through buffers as 8-bit numbers, of a cache in host memory and of a GPU's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from common.engine.kv.cache import KVCache
from common.engine.kv.quantised_staging import quantised_incoming, quantised_outgoing
from common.errors import BlockError
from common.model_files.config import from_hf
from kernels import gather_blocks, scatter_blocks


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def caches(tiny_folder: Path, request: pytest.FixtureRequest) -> tuple[KVCache, KVCache]:
    source, target = (KVCache(from_hf(tiny_folder / "config.json"), 6, 64, "bfloat16", request.param) for _ in range(2))
    source.tensor.normal_()
    if request.param == "cuda":
        torch.cuda.synchronize()
    return source, target


def test_blocks_are_those_of_the_kernels(caches: tuple[KVCache, KVCache]) -> None:
    source, target = caches
    outgoing, incoming = quantised_outgoing(source), quantised_incoming(target)
    ids = torch.tensor([0, 3, 5, 1], device=source.device)
    rows = gather_blocks(source.tensor, ids, quantised=True)
    for message in ((0, 3), (5, 1)):
        for index in message:
            view = outgoing.view(index)
            assert bytes(view) == bytes(rows[ids.tolist().index(index)].tolist())
            incoming.view(index)[:] = view
        assert not target.tensor[list(message)].any()
        incoming.commit(message)
    expected = torch.zeros_like(target.tensor)
    scatter_blocks(rows, expected, ids, quantised=True)
    assert torch.equal(target.tensor, expected)


def test_buffers_are_bounded(caches: tuple[KVCache, KVCache]) -> None:
    source, target = caches
    outgoing, incoming = quantised_outgoing(source), quantised_incoming(target)
    views = [outgoing.view(index) for index in (1, 2)]
    expected = [bytes(view) for view in views]
    source.tensor.zero_()
    outgoing.view(3)
    assert [bytes(view) for view in views] == expected and outgoing.num_buffers == 3
    del views
    for _ in range(3):
        for index in range(3):
            incoming.view(index)[:] = outgoing.view(index)
        incoming.commit([0, 2])
    assert outgoing.num_buffers == 3 and len(incoming._free) == 3
    assert len(incoming.view(0)) == outgoing.block_bytes < source.block_bytes


def test_a_block_out_of_range_is_refused(caches: tuple[KVCache, KVCache]) -> None:
    with pytest.raises(BlockError, match="invalid block 6: the cache has 6"):
        quantised_outgoing(caches[0]).view(6)


def test_slots_are_cleared_from_one_on(caches: tuple[KVCache, KVCache]) -> None:
    kv = caches[0]
    before = kv.tensor.clone()
    kv.clear_slots(2, 60)
    assert not kv.tensor[2, :, :, 60:].any()
    before[2, :, :, 60:] = 0
    assert torch.equal(kv.tensor, before)
