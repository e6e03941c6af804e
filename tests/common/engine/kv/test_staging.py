"""Blocks that pass through buffers: the device is the CPU here, the bookkeeping is what a GPU's blocks go through."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import zmq

from benchmarks.stack import free_port
from common.engine.kv.cache import KVCache
from common.engine.kv.copy_stream import CopyStream
from common.engine.kv.staging import (
    BlocksInPlace,
    StagedIncoming,
    StagedOutgoing,
    incoming_blocks,
    outgoing_blocks,
)
from common.engine.transfer import frames as kv_frames
from common.errors import BlockError
from common.model_files.config import from_hf
from common.wire.codec import decode
from common.wire.messages import KVBlocks
from kernels.interface.pinned_memory import granted, pinned

from ....pretended_gpu import pretended_gpu

CPU = torch.device("cpu")


@pytest.fixture
def make_kv(tiny_folder: Path) -> Callable[[], KVCache]:
    def make() -> KVCache:
        kv = KVCache(from_hf(tiny_folder / "config.json"), 6, 256, "bfloat16")
        kv.tensor.normal_()
        return kv

    return make


def test_a_cache_in_host_memory_is_not_copied(make_kv: Callable[[], KVCache]) -> None:
    kv = make_kv()
    for blocks in (outgoing_blocks(kv), incoming_blocks(kv)):
        assert isinstance(blocks, BlocksInPlace)
        blocks.view(2)[:] = kv.block(1)
        assert torch.equal(kv.tensor[2], kv.tensor[1])


def test_a_view_keeps_its_bytes_and_its_buffer_is_used_again(make_kv: Callable[[], KVCache]) -> None:
    kv = make_kv()
    blocks = StagedOutgoing(kv, CopyStream(CPU))
    first, expected = blocks.view(1), bytes(kv.block(1))
    kv.tensor[1].zero_()
    second = blocks.view(2)
    assert bytes(first) == expected and bytes(second) == bytes(kv.block(2))
    part = first[10:20]
    del first
    blocks.view(3)
    assert bytes(part) == expected[10:20] and blocks.num_buffers == 3
    del part, second
    for index in range(6):
        assert bytes(blocks.view(index)) == bytes(kv.block(index))
    assert blocks.num_buffers == 3


def test_a_buffer_is_not_reused_before_its_frame_has_left(make_kv: Callable[[], KVCache]) -> None:
    kv = make_kv()
    assert kv.block_bytes > 65536  # smaller frames are copied by pyzmq, and prove nothing
    blocks = StagedOutgoing(kv, CopyStream(CPU))
    port = free_port()
    with zmq.Context() as context, context.socket(zmq.DEALER) as sender:
        sender.set(zmq.LINGER, 0)
        sender.connect(f"tcp://127.0.0.1:{port}")
        expected = [bytes(kv.block(index)) for index in (0, 1, 2, 3)]
        assert kv_frames.try_send_blocks(sender, "a", 0, 0, [blocks.view(0), blocks.view(1)])
        assert kv_frames.try_send_blocks(sender, "a", 0, 2, [blocks.view(2), blocks.view(3)])
        assert blocks.num_buffers == 4  # nothing has left: no worker listens
        kv.tensor.zero_()
        with context.socket(zmq.ROUTER) as late:
            late.set(zmq.LINGER, 0)
            late.bind(f"tcp://127.0.0.1:{port}")
            frames: list[bytes] = []
            for _ in range(2):
                _, header, *parts = late.recv_multipart()
                message = decode(header)
                assert isinstance(message, KVBlocks)
                assert message.checksums == tuple(kv_frames.checksum(memoryview(part)) for part in parts)
                frames += parts
            assert frames == expected
        deadline = time.monotonic() + 60
        while blocks._free.qsize() < 4 and time.monotonic() < deadline:
            gc.collect()
            time.sleep(0.01)
        assert blocks._free.qsize() == 4


def test_only_committed_blocks_change(make_kv: Callable[[], KVCache]) -> None:
    kv, source = make_kv(), make_kv()
    before = kv.tensor.clone()
    blocks = StagedIncoming(kv, CopyStream(CPU))
    for index in (1, 2, 4):
        blocks.view(index)[:] = source.block(index)
        assert bytes(blocks.view(index)) == bytes(source.block(index))
    assert torch.equal(kv.tensor, before)
    blocks.commit([1, 4])
    for index in range(6):
        assert torch.equal(kv.tensor[index], source.tensor[index] if index in (1, 4) else before[index])


def test_staging_buffers_are_used_again(make_kv: Callable[[], KVCache]) -> None:
    kv, source = make_kv(), make_kv()
    blocks = StagedIncoming(kv, CopyStream(CPU))
    for message in ((0, 1), (2, 3), (4, 5)):
        for index in message:
            blocks.view(index)[:] = source.block(index)
        blocks.commit(message)
    assert torch.equal(kv.tensor, source.tensor) and len(blocks._free) == 2


def test_a_block_out_of_range_is_refused(make_kv: Callable[[], KVCache]) -> None:
    blocks = StagedOutgoing(make_kv(), CopyStream(CPU))
    with pytest.raises(BlockError, match="invalid block 6: the cache has 6"):
        blocks.view(6)


def test_reserved_buffers_are_pinned_and_no_others(
    make_kv: Callable[[], KVCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = make_kv(), make_kv()
    monkeypatch.setattr(CopyStream, "pins", True)
    with pretended_gpu(monkeypatch):
        outgoing = StagedOutgoing(source, CopyStream(CPU)).reserve(3)
        incoming = StagedIncoming(target, CopyStream(CPU)).reserve(2)
        assert pinned().num_bytes == granted(3 * source.block_bytes) + granted(2 * source.block_bytes)
        views = [outgoing.view(index) for index in range(5)]
        assert outgoing.num_buffers == 5
        for index, view in enumerate(views):
            incoming.view(index)[:] = view
        incoming.commit(range(5))
        assert torch.equal(target.tensor[:5], source.tensor[:5])
        assert pinned().num_bytes == granted(3 * source.block_bytes) + granted(2 * source.block_bytes)
        del outgoing, incoming, views, view
        gc.collect()
        assert pinned().num_bytes == 0


def test_registered_memory_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, memory = CopyStream(CPU), torch.empty(8192, dtype=torch.uint8)
    monkeypatch.setattr(stream, "_stream", object())
    monkeypatch.setattr(stream, "_call", lambda function, *arguments: 0)
    before = pinned().num_bytes
    stream.register(memory)
    assert pinned().num_bytes == before + 8192
    stream.unregister(memory)
    assert pinned().num_bytes == before


@pytest.mark.gpu
def test_blocks_of_a_gpu_pass_through_pinned_memory(tiny_folder: Path) -> None:
    config = from_hf(tiny_folder / "config.json")
    source, target = (KVCache(config, 6, 64, "bfloat16", "cuda") for _ in range(2))
    source.tensor.normal_()
    torch.cuda.synchronize()
    outgoing, incoming = outgoing_blocks(source), incoming_blocks(target)
    for message in ((0, 3), (5, 1)):
        for index in message:
            view = outgoing.view(index)
            assert bytes(view) == bytes(source.tensor[index].cpu().view(torch.uint8).numpy())
            incoming.view(index)[:] = view
        incoming.commit(message)
    for index in range(6):
        expected = source.tensor[index] if index in (0, 1, 3, 5) else torch.zeros_like(source.tensor[index])
        assert torch.equal(target.tensor[index], expected)
