"""Blocks that a receiver's GPU copies out of a sender's, by the real sender and receiver over a pretended driver."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue

import pytest
import torch
import zmq

from common.engine.kv.cache import KVCache
from common.engine.kv.copy_stream import CopyStream
from common.engine.kv.cuda_driver import driver
from common.engine.kv.shared_memory import SharedMemoryError
from common.engine.kv.staging import StagedIncoming, StagedOutgoing
from common.engine.transfer import peer_memories
from common.engine.transfer.receiver import (
    IncomingTransfer,
    KVListener,
    KVReceiver,
    TransferCompleted,
    TransferFailed,
    TransferOpened,
)
from common.engine.transfer.sender import KVSender, TransferEnded
from common.engine.transfer.transports.cuda_ipc import DeviceBlocks, DeviceReads, DeviceSums, ImportedMemory
from common.engine.transfer.transports.tcp import Frames
from common.model_files.config import from_hf
from common.model_files.resolve import resolve_model
from common.wire.messages import KVDone, KVGrant, KVTarget
from kernels import block_sums

from ..... import pretended_cuda

NUM_BLOCKS = 24
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def pretended(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with pretended_cuda.pretended(monkeypatch):
        yield


def cache(*, export: bool = False) -> KVCache:
    folder = resolve_model("tiny-random").weights[0].parent
    kv = KVCache(from_hf(folder / "config.json"), NUM_BLOCKS, 16, "float32", export=export)
    kv.tensor.normal_()
    return kv


class Pair:
    """A sender of `source` and a receiver into `target`, in one process. `opened` grants what is offered."""

    def __init__(self, *, imports: bool = True) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.source, self.target = cache(export=True), cache()
        self.events: SimpleQueue[TransferOpened | TransferCompleted | TransferFailed] = SimpleQueue()
        self.ended: SimpleQueue[TransferEnded] = SimpleQueue()
        incoming = StagedIncoming(self.target, CopyStream(CPU))
        self.receiver = KVReceiver(
            self.context,
            KVListener(self.context, "127.0.0.1", 0),
            incoming,
            self.events.put,
            transports=[DeviceReads(self.target)] if imports else (),
        )
        frames = Frames(StagedOutgoing(self.source, CopyStream(CPU)).view)
        self.device = DeviceBlocks(frames, self.source)
        self.sender = KVSender(
            self.context,
            frames,
            self.device,
            self.source.block_bytes,
            ("p", 1, "layout"),
            self.ended.put,
            lease_s=30.0,
            num_streams=1,
        )
        self.receiver.start()
        self.sender.start()

    def ship(self, name: str, blocks: Sequence[int], into: Sequence[int], *, first: int = 0) -> IncomingTransfer:
        """Blocks of `source` into those of `target`; ended when this returns."""
        self.sender.open(name, 0, KVTarget("d", 1, self.receiver.address), blocks, len(blocks))
        opened = self.events.get(timeout=60)
        assert isinstance(opened, TransferOpened)
        now = time.monotonic()
        transfer = IncomingTransfer(name, 0, opened.peer, into, first, now, now, memory=opened.memory)
        self.receiver.expect(transfer)
        shared = opened.memory is not None
        self.receiver.send(opened.peer, KVGrant(request_id=name, attempt=0, first_block=first, shared=shared))
        self.sender.progress(name, 0, len(blocks), KVDone(request_id=name, attempt=0, first_token=3))
        return transfer

    def complete(self) -> TransferEnded:
        assert isinstance(self.events.get(timeout=60), TransferCompleted)
        ended = self.ended.get(timeout=60)
        assert ended.reason == ""
        return ended

    def close(self) -> None:
        self.sender.stop()
        self.receiver.stop()
        self.context.term()
        assert self.source.exported is not None
        self.source.exported.close()


@pytest.fixture
def new_pair() -> Iterator[Callable[..., Pair]]:
    pairs: list[Pair] = []

    def make(**options: bool) -> Pair:
        pairs.append(Pair(**options))
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.close()


def test_blocks_go_from_one_device_to_the_other(
    new_pair: Callable[..., Pair], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    pair = new_pair()
    before = pair.target.tensor.clone()
    blocks, into = (5, 0, 9, 23, 1), (8, 7, 3, 22, 0)
    transfer = pair.ship("a", blocks, into, first=1)
    ended = pair.complete()
    assert isinstance(transfer.memory, ImportedMemory) and transfer.transport == ended.transport == "cuda-ipc"
    for source, target in list(zip(blocks, into, strict=True))[1:]:
        assert torch.equal(pair.target.tensor[target], pair.source.tensor[source])
    untouched = [block for block in range(NUM_BLOCKS) if block not in into[1:]]
    assert torch.equal(pair.target.tensor[untouched], before[untouched])
    assert pair.receiver.num_bytes == pair.sender.num_bytes == 4 * pair.source.block_bytes == ended.num_bytes
    assert "KV transfer from p: GPU to GPU" in caplog.text and "KV transfer to d: GPU to GPU" in caplog.text
    caplog.clear()
    again = pair.ship("b", range(NUM_BLOCKS), range(NUM_BLOCKS))
    pair.complete()
    assert again.memory is transfer.memory and torch.equal(pair.target.tensor, pair.source.tensor)
    assert "GPU" not in caplog.text  # said once


@pytest.mark.parametrize("when", ["before it is copied", "while it is copied"])
def test_a_block_that_was_taken_back_is_not_taken_for_what_it_was(
    new_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    pair = new_pair()
    usual, copy = pair.device.sums, driver().copy

    def overwrite(*arguments: int) -> None:
        copy(*arguments)
        pair.target.tensor[4, 0, 0, 3, 0, 0] += 1.0  # what a late copy of other bytes leaves

    def sums(blocks: Sequence[int]) -> list[int]:
        found = usual(blocks)
        pair.source.tensor[2, 0, 0, 0, 0, 0] += 1.0
        return found

    if when.startswith("before"):
        monkeypatch.setattr(pair.device, "sums", sums)
    else:
        monkeypatch.setattr(driver(), "copy", overwrite)
    transfer = pair.ship("a", (2,), (4,))
    failed, ended = pair.events.get(timeout=60), pair.ended.get(timeout=60)
    assert isinstance(failed, TransferFailed) and "block 0 is corrupt, or its sender reused it" in failed.reason
    assert not transfer.received and "corrupt" in ended.reason


def test_a_receiver_that_reads_no_gpu_gets_frames(
    new_pair: Callable[..., Pair], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    pair = new_pair(imports=False)
    transfer = pair.ship("a", range(3), range(3))
    assert pair.complete().transport == transfer.transport == "tcp"
    assert torch.equal(pair.target.tensor[:3], pair.source.tensor[:3])
    assert "KV transfer from p: TCP (this worker's --kv-transport does not accept cuda-ipc)" in caplog.text


def test_a_gpu_that_cannot_reach_the_other_gets_frames_until_it_can(
    new_pair: Callable[..., Pair], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(peer_memories, "RETRY_S", 0.0)
    monkeypatch.setenv("PRETENDED_CUDA_FAILS", "cuMemImportFromShareableHandle")
    pair = new_pair()
    for name in ("a", "b"):
        pair.ship(name, range(3), range(3))
        assert pair.complete().transport == "tcp"
    assert caplog.text.count("KV transfer from p: TCP (cuMemImportFromShareableHandle: pretended error (801)") == 1
    monkeypatch.delenv("PRETENDED_CUDA_FAILS")
    pair.ship("c", range(3), range(3))
    assert pair.complete().transport == "cuda-ipc"


def test_a_copy_that_the_driver_refuses_ends_the_transfer_and_not_the_thread(
    new_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = new_pair()
    monkeypatch.setenv("PRETENDED_CUDA_FAILS", "cuMemcpyAsync")
    pair.ship("a", range(3), range(3))
    failed = pair.events.get(timeout=60)
    assert isinstance(failed, TransferFailed) and "cuMemcpyAsync" in failed.reason
    assert "cuMemcpyAsync" in pair.ended.get(timeout=60).reason
    monkeypatch.delenv("PRETENDED_CUDA_FAILS")
    pair.ship("b", range(3), range(3))
    assert pair.complete().transport == "cuda-ipc"


def test_a_block_that_the_memory_does_not_have(new_pair: Callable[..., Pair]) -> None:
    pair = new_pair()
    transfer = pair.ship("a", (0,), (0,))
    pair.complete()
    assert isinstance(transfer.memory, ImportedMemory)
    beyond = transfer.memory.offer.num_bytes // pair.source.block_bytes
    wrong, right = transfer.memory.reached.copy([(beyond, 1), (6, 2)])
    assert wrong is None and right == pair.device.sums([6])[0]


def test_memory_that_was_closed_is_not_read() -> None:
    """As it is when its owner was seen to be dead; what that sent before may be read from the socket afterwards."""
    source, target = cache(export=True), cache()
    assert source.exported is not None
    memory = DeviceReads(target).accept(source.exported.offer)
    (found,) = memory.reached.copy([(1, 1)])
    assert found == DeviceSums(source, CopyStream(CPU)).of([1])[0]
    before = target.tensor.clone()
    memory.close()
    assert list(memory.reached.copy([(2, 2), (3, 3)])) == [None, None] and torch.equal(target.tensor, before)
    source.exported.close()


def test_sums_are_those_of_the_kernel_without_a_sign() -> None:
    kv = cache()
    found = DeviceSums(kv, CopyStream(CPU)).of([7, 0, 7])
    assert found == [value % 2**64 for value in block_sums(kv.tensor, torch.tensor([7, 0, 7])).tolist()]
    assert len(set(found)) == 2 and all(0 <= value < 2**64 for value in found)


def test_a_cache_that_was_not_exported_is_not_offered() -> None:
    with pytest.raises(SharedMemoryError, match="was not created for export to other GPUs"):
        DeviceBlocks(Frames(lambda index: memoryview(b"")), cache())
