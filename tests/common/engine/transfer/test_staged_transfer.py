"""Blocks that are not in host memory: through buffers on both sides, the same bytes, received only once committed."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch
import zmq

from common.engine.kv.block_ring import BlockRing
from common.engine.kv.cache import KVCache
from common.engine.kv.copy_stream import CopyStream
from common.engine.kv.staging import StagedIncoming, StagedOutgoing
from common.engine.transfer.receiver import (
    IncomingTransfer,
    KVListener,
    KVReceiver,
    TransferCompleted,
    TransferFailed,
    TransferOpened,
)
from common.engine.transfer.sender import KVSender, TransferEnded
from common.engine.transfer.transports.shm import RingSlotSource, SharedBlocks, SharedReads
from common.engine.transfer.transports.tcp import Frames
from common.model_files.config import from_hf
from common.model_files.resolve import resolve_model
from common.wire.messages import KVDone, KVGrant, KVTarget

NUM_BLOCKS = 40
CPU = torch.device("cpu")


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    with zmq.Context() as context:
        yield context


def cache(folder: Path) -> KVCache:
    return KVCache(from_hf(folder / "config.json"), NUM_BLOCKS, 128, "float32")


@pytest.mark.parametrize("num_places", [0, 3], ids=["buffers", "ring"])
def test_a_transfer_of_blocks_that_are_not_in_host_memory(
    context: zmq.Context[zmq.Socket[bytes]], num_places: int
) -> None:
    folder = resolve_model("tiny-random").weights[0].parent
    source, target = cache(folder), cache(folder)
    source.tensor.normal_()
    outgoing, incoming = StagedOutgoing(source, CopyStream(CPU)), StagedIncoming(target, CopyStream(CPU))
    events: SimpleQueue[TransferOpened | TransferCompleted | TransferFailed] = SimpleQueue()
    ended: SimpleQueue[TransferEnded] = SimpleQueue()
    committed: list[int] = []
    commit = incoming.commit

    def committing(blocks: Sequence[int]) -> None:
        committed.extend(blocks)
        commit(blocks)

    incoming.commit = committing  # type: ignore[method-assign]
    reads = SharedReads(lambda memory: RingSlotSource(incoming, memory))
    receiver = KVReceiver(context, KVListener(context, "127.0.0.1", 0), incoming, events.put, transports=(reads,))
    ring, frames = BlockRing(outgoing, num_places) if num_places else None, Frames(outgoing.view)
    sender = KVSender(
        context,
        frames,
        SharedBlocks(frames, ring=ring) if ring else None,
        source.block_bytes,
        ("p", 1, "layout"),
        ended.put,
        lease_s=30.0,
        num_streams=1,
    )
    receiver.start()
    sender.start()
    try:
        sender.open("a", 0, KVTarget("d", 1, receiver.address), list(range(NUM_BLOCKS)), NUM_BLOCKS)
        opened = events.get(timeout=60)
        assert isinstance(opened, TransferOpened)
        blocks, now = tuple(reversed(range(NUM_BLOCKS))), time.monotonic()
        receiver.expect(IncomingTransfer("a", 0, opened.peer, blocks, 1, now, now, memory=opened.memory))
        shared = opened.memory is not None
        assert shared == bool(num_places)
        receiver.send(opened.peer, KVGrant(request_id="a", attempt=0, first_block=1, shared=shared))
        sender.progress("a", 0, NUM_BLOCKS, KVDone(request_id="a", attempt=0, first_token=3))
        assert isinstance(events.get(timeout=60), TransferCompleted)
        assert ended.get(timeout=60).reason == ""
    finally:
        sender.stop()
        receiver.stop()
    assert sorted(committed) == ([] if num_places else list(range(NUM_BLOCKS - 1)))
    for index in range(1, NUM_BLOCKS):
        assert torch.equal(target.tensor[blocks[index]], source.tensor[index])
    assert not target.tensor[blocks[0]].any()
    assert outgoing.num_buffers < NUM_BLOCKS and len(incoming._free) < NUM_BLOCKS
