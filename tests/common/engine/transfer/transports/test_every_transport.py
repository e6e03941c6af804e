"""Sender and receiver joined over real sockets: what is computed on one side is what arrives on the other."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import pytest

from common.engine.kv.block_ring import BlockRing
from common.engine.kv.shared_memory import SharedMemory
from common.engine.transfer.receiver import IncomingTransfer, TransferCompleted, TransferFailed, TransferOpened
from common.engine.transfer.sender import KVSender, TransferEnded
from common.engine.transfer.transports.interface import IncomingEnd, OutgoingEnd
from common.engine.transfer.transports.nixl import RemoteBlocks, RemoteReads
from common.engine.transfer.transports.shm import SharedBlocks, SharedReads
from common.engine.transfer.transports.tcp import Frames
from common.wire.messages import KVDone, KVGrant, KVTarget

from .....late_stream import LateStream, reach_into, ring_over
from .....pretended_nixl import PretendedNixl
from .....waiting import wait_until

NUM_BLOCKS, NUM_PLACES = 48, 5
Rig = Any


@functools.lru_cache(maxsize=1)
def random_bytes(count: int) -> bytes:
    return np.random.default_rng(1).bytes(count)


class Source:
    """Blocks of a sender, in host memory that others may map, or on a device that copies them to a ring."""

    def __init__(self, block_bytes: int) -> None:
        self.shared = SharedMemory(NUM_BLOCKS * block_bytes)
        pages = memoryview(self.shared.pages)[: NUM_BLOCKS * block_bytes]
        self.blocks = np.frombuffer(pages, np.uint8).reshape(NUM_BLOCKS, block_bytes)
        pages[:] = random_bytes(len(pages))
        self.frames = Frames(lambda index: memoryview(self.blocks[index]))
        self.device, self.nixl = LateStream(), PretendedNixl()
        self.ring: BlockRing | None = None

    def new_ring(self) -> BlockRing:
        self.ring = ring_over(self.blocks, NUM_PLACES, self.device)
        return self.ring

    @property
    def region(self) -> tuple[int, int]:
        return self.blocks.ctypes.data, self.blocks.nbytes


# The matrix: each way for blocks to travel, as (sending end, receiving end). The name begins with the transport's.
# A sending end is made of a `Source`; a receiving end of that and uint8 [blocks, bytes], where blocks are to arrive.
Ends = tuple[Callable[[Source], OutgoingEnd | None], Callable[[Source, Any], Sequence[IncomingEnd[Any]]]]
WAYS: dict[str, Ends] = {
    "tcp": (lambda source: None, lambda source, memory: ()),
    "shm": (lambda source: SharedBlocks(source.frames, source.shared.offer), lambda source, memory: [SharedReads()]),
    "shm ring": (
        lambda source: SharedBlocks(source.frames, ring=source.new_ring()),
        lambda source, memory: [SharedReads()],
    ),
    "shm ring to device": (
        lambda source: SharedBlocks(source.frames, ring=source.new_ring()),
        lambda source, memory: [SharedReads(reach_into(memory, source.device))],
    ),
    "nixl": (
        lambda source: RemoteBlocks(source.frames, cast(Any, source.nixl), source.region),
        lambda source, memory: [RemoteReads(cast(Any, source.nixl), memory.shape[1])],
    ),
    "nixl ring": (
        lambda source: RemoteBlocks(source.frames, cast(Any, source.nixl), (ring := source.new_ring()).region, ring),
        lambda source, memory: [RemoteReads(cast(Any, source.nixl), memory.shape[1])],
    ),
}


class Pair:
    """A prefill worker's sender, and a decode worker's receiver that grants what `plan` says: (blocks, first)."""

    def __init__(
        self, rig: Rig, source: Source, outgoing: OutgoingEnd | None, *, num_streams: int, lease_s: float
    ) -> None:
        self.rig, self.source, self.ring = rig, source.blocks, source.ring
        self.plan: dict[str, tuple[list[int], int]] = {}
        self.received: dict[str, IncomingTransfer] = {}
        self.ended: dict[str, TransferEnded] = {}
        self.failed: list[TransferFailed] = []
        rig.on_event = self.on_event
        self.sender = KVSender(
            rig.context,
            source.frames,
            outgoing,
            rig.block_bytes,
            ("p", 5, "layout"),
            lambda event: self.ended.update({event.request_id: event}),
            lease_s=lease_s,
            num_streams=num_streams,
        )
        self.sender.start()

    def on_event(self, event: TransferOpened | TransferCompleted | TransferFailed) -> None:
        match event:
            case TransferOpened(peer, message, _, memory):
                blocks, first = self.plan[message.request_id]
                transfer = IncomingTransfer(message.request_id, 0, peer, tuple(blocks), first, 0.0, 0.0, memory=memory)
                self.rig.receiver.expect(transfer)
                shared = memory is not None
                grant = KVGrant(request_id=message.request_id, attempt=0, first_block=first, shared=shared)
                self.rig.receiver.send(peer, grant)
            case TransferCompleted(transfer):
                self.received[transfer.request_id] = transfer
            case TransferFailed():
                self.failed.append(event)

    def open(self, name: str, source: list[int], target: list[int], *, first: int = 0, num_ready: int = 0) -> None:
        self.plan[name] = (target, first)
        self.sender.open(name, 0, KVTarget("d", 7, self.rig.receiver.address), source, num_ready)

    def finish(self, name: str, num_blocks: int) -> None:
        self.sender.progress(name, 0, num_blocks, KVDone(request_id=name, attempt=0, first_token=3))

    def wait(self, condition: Callable[[], object]) -> None:
        wait_until(condition)


@pytest.fixture(params=WAYS)
def make_pair(make_rig: Callable[..., Rig], request: pytest.FixtureRequest) -> Iterator[Callable[..., Pair]]:
    pairs: list[Pair] = []

    def make(block_bytes: int = 64, num_streams: int = 1, lease_s: float = 30.0) -> Pair:
        source, (outgoing, incoming) = Source(block_bytes), WAYS[request.param]
        rig = make_rig(
            num_blocks=NUM_BLOCKS, block_bytes=block_bytes, transports=lambda memory: incoming(source, memory)
        )
        pairs.append(Pair(rig, source, outgoing(source), num_streams=num_streams, lease_s=lease_s))
        return pairs[-1]

    yield make
    for pair in pairs:
        if pair.ring is not None:
            pair.wait(lambda ring=pair.ring: ring.num_free == NUM_PLACES)  # type: ignore[misc]
        pair.sender.stop()
        if pair.ring is not None:
            pair.ring.check_integrity()
        assert {event.transport for event in pair.ended.values() if not event.reason} <= {request.param.split()[0]}


@pytest.mark.quick_cover(1)
@pytest.mark.parametrize("num_streams", [1, 3])
@pytest.mark.parametrize("block_bytes", [64, 2**20])
def test_transfers_side_by_side_land_intact(make_pair: Callable[..., Pair], block_bytes: int, num_streams: int) -> None:
    pair, rng = make_pair(block_bytes, num_streams), random.Random(0)
    source, target = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS), rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    firsts = {f"r{i}": i % 5 for i in range(12)}  # 0: everything is missing, 4: nothing is
    for i, (name, first) in enumerate(firsts.items()):
        mine = slice(4 * i, 4 * i + 4)
        pair.open(name, source[mine], target[mine], first=first, num_ready=i % 4)
        pair.finish(name, 4)
    pair.wait(lambda: len(pair.ended) == len(pair.received) == 12)
    assert {event.reason for event in pair.ended.values()} == {""}
    for i, first in enumerate(firsts.values()):
        for k in range(first, 4):
            assert (pair.rig.memory[target[4 * i + k]] == pair.source[source[4 * i + k]]).all()
    num_shipped = sum(4 - first for first in firsts.values())
    assert pair.sender.num_bytes == pair.rig.receiver.num_bytes == num_shipped * block_bytes


def test_transfer_overlaps_computing(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    pair.open("a", list(range(4)), list(range(4)))
    for num_ready in (1, 2, 3):
        pair.sender.progress("a", 0, num_ready)
        pair.wait(lambda n=num_ready: pair.rig.receiver.num_bytes == n * 64)  # type: ignore[misc]
    pair.finish("a", 4)
    pair.wait(lambda: "a" in pair.ended and "a" in pair.received)


def test_an_abort_in_flight_harms_nobody(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(2**20)
    blocks = list(range(NUM_BLOCKS))
    pair.open("a", blocks, blocks, num_ready=NUM_BLOCKS)
    pair.wait(lambda: pair.rig.receiver.num_bytes)
    pair.rig.receiver.release("a", 0)
    pair.rig.memory[:] = 99
    pair.open("b", blocks[:2], blocks[:2], num_ready=2)
    pair.finish("b", 2)
    pair.finish("a", NUM_BLOCKS)
    pair.wait(lambda: "b" in pair.received)
    assert (pair.rig.memory[:2] == pair.source[:2]).all()
    assert (pair.rig.memory[2:] == 99).all()
    assert "a" not in pair.received


def test_blocks_reused_under_the_sender_never_land_as_good(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(2**20)
    blocks, original = list(range(NUM_BLOCKS)), pair.source.copy()
    pair.open("a", blocks, blocks, num_ready=NUM_BLOCKS)
    pair.wait(lambda: pair.rig.receiver.num_bytes)
    pair.sender.cancel("a", 0, "superseded")
    pair.source[:] = 0
    pair.wait(lambda: pair.failed)
    transfer = pair.rig.receiver.release("a", 0)
    for index in transfer.received if transfer is not None else ():
        assert (pair.rig.memory[index] == original[index]).all()
    assert "a" not in pair.received


def test_a_lost_grant_ends_on_both_sides(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    events = list[object]()
    pair.rig.on_event = lambda event: (pair.failed if isinstance(event, TransferFailed) else events).append(event)
    pair.open("a", [0], [0], num_ready=1)
    pair.wait(lambda: events)  # what was never announced would not be taken back
    pair.sender._transfers["a", 0].lease_until = 0.0
    pair.wait(lambda: pair.failed and pair.ended)
    assert [(event.reason, event.by_peer) for event in pair.failed] == [("lease expired", True)]
