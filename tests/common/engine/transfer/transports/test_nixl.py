"""Blocks that a receiver reads with NIXL: they land beside the cache, and no read that was given up reaches it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from common.engine.transfer import peer_memories
from common.engine.transfer.frames import blocks_per_message
from common.engine.transfer.receiver import TransferCompleted, TransferFailed
from common.engine.transfer.transports import nixl as transport
from common.engine.transfer.transports.nixl import (
    MOST_OF_ONE,
    NUM_SLOTS,
    OfferedMemory,
    RemoteMemory,
    RemoteReads,
)
from common.wire.messages import KVAck, KVBlocks, KVFailed, KVOffer, KVTaken

from .....pretended_nixl import PretendedNixl
from .....waiting import wait_until

Rig = Any
BLOCK_BYTES = 64


class RemoteSide:
    """A rig whose receiver reads with a pretended NIXL, and the memory that its peer offers: blocks 0 to 63."""

    def __init__(self, rig: Rig, nixl: PretendedNixl, *, is_ring: bool) -> None:
        self.rig, self.nixl, self.peer = rig, nixl, rig.peer()
        self.blocks = np.stack([np.frombuffer(block, np.uint8) for block in self.peer.blocks]).copy()
        self.offered = OfferedMemory(nixl, (self.blocks.ctypes.data, self.blocks.nbytes), is_ring=is_ring)  # type: ignore[arg-type]

    def expect(self, blocks: tuple[int, ...] = (7, 3, 5, 1), name: str = "a") -> Any:
        return self.rig.expect(self.peer, blocks, name, offer=KVOffer.of("nixl", self.offered.offer))


def acknowledged(side: RemoteSide) -> bool:
    """Places are given back unless the end was known before."""
    while isinstance(reply := side.peer.read(), KVTaken):
        pass
    return isinstance(reply, KVAck)


def remote_side(make_rig: Callable[..., Rig], *, is_prompt: bool = True, is_ring: bool = True) -> RemoteSide:
    nixl = PretendedNixl(is_prompt=is_prompt)
    rig = make_rig(transports=lambda memory: [RemoteReads(nixl, BLOCK_BYTES)])  # type: ignore[arg-type]
    return RemoteSide(rig, nixl, is_ring=is_ring)


@pytest.fixture
def side(make_rig: Callable[..., Rig]) -> RemoteSide:
    return remote_side(make_rig)


@pytest.fixture
def late(make_rig: Callable[..., Rig]) -> RemoteSide:
    """Its reads end when the test says so."""
    return remote_side(make_rig, is_prompt=False)


def test_blocks_are_read_and_places_given_back(side: RemoteSide) -> None:
    transfer = side.expect()
    assert isinstance(transfer.memory, RemoteMemory) and transfer.transport == "nixl"
    side.peer.name(0, [9, 2])
    assert side.peer.read() == KVTaken(request_id="a", attempt=0, places=(9, 2))
    side.blocks[9] = 0  # filled again: what was read stays
    side.peer.name(2, [4, 4])
    side.peer.done()
    assert side.peer.read() == KVTaken(request_id="a", attempt=0, places=(4, 4))
    assert isinstance(side.peer.read(), KVAck)
    assert isinstance(side.rig.event(), TransferCompleted)
    memory, blocks = side.rig.memory, side.peer.blocks
    assert [bytes(memory[index]) for index in (7, 3, 5, 1)] == [blocks[9], blocks[2], blocks[4], blocks[4]]


def test_a_cache_needs_no_giving_back(make_rig: Callable[..., Rig]) -> None:
    side = remote_side(make_rig, is_ring=False)
    side.expect((7, 3))
    side.peer.name(0, [9, 2])
    side.peer.done()
    assert isinstance(side.peer.read(), KVAck)
    assert [bytes(side.rig.memory[index]) for index in (7, 3)] == [side.peer.blocks[9], side.peer.blocks[2]]


def test_the_end_may_come_before_the_blocks(late: RemoteSide) -> None:
    late.expect((7,))
    late.peer.name(0, [9])
    late.peer.done()
    wait_until(lambda: late.nixl.reads)
    late.rig.sync()
    assert not late.peer.socket.poll(50) and not late.rig.memory.any()
    late.nixl.deliver(late.nixl.reads[0])
    assert isinstance(late.peer.read(), KVAck) and bytes(late.rig.memory[7]) == late.peer.blocks[9]


def test_frames_are_taken_beside_reads(side: RemoteSide) -> None:
    """The sender had no place left."""
    side.expect((0, 1, 2, 3))
    side.peer.name(0, [1])
    assert isinstance(side.peer.read(), KVTaken)
    side.peer.ship(1, 3)
    side.peer.done()
    assert isinstance(side.peer.read(), KVAck)
    assert [bytes(block) for block in side.rig.memory[:4]] == side.peer.blocks[1:2] + side.peer.blocks[1:4]


def test_what_is_overwritten_before_it_is_read_is_not_taken(late: RemoteSide) -> None:
    transfer = late.expect()
    late.peer.name(0, [1, 2])
    wait_until(lambda: late.nixl.reads)
    late.blocks[2, 5] ^= 1
    late.nixl.deliver(late.nixl.reads[0])
    reply = late.peer.read()
    assert isinstance(reply, KVFailed) and "block 1 is corrupt" in reply.reason
    assert transfer.received == {0}
    assert isinstance(late.rig.event(), TransferFailed)


def test_a_read_that_ends_after_its_transfer_reaches_no_block(late: RemoteSide) -> None:
    late.expect()
    late.peer.name(0, [1, 2])
    wait_until(lambda: late.nixl.reads)
    late.rig.receiver.release("a", 0)
    late.rig.memory[:] = 99
    late.nixl.deliver(late.nixl.reads[0])
    assert late.peer.read() == KVTaken(request_id="a", attempt=0, places=(1, 2))
    assert (late.rig.memory == 99).all()


def test_a_peer_that_does_not_answer_costs_its_own_transfers_only(late: RemoteSide) -> None:
    """Its reads are given up; what they still write spoils nothing; frames take their place."""
    other = RemoteSide(late.rig, late.nixl, is_ring=True)
    other.offered.offer = other.offered.offer.__class__("other", *_rest(other))
    late.expect((7, 3))
    other.expect((5,), "b")
    late.peer.name(0, [1])
    late.peer.name(1, [2])
    wait_until(lambda: len(late.nixl.reads) == 2)
    other.peer.name(0, [9], "b")
    wait_until(lambda: len(late.nixl.reads) == 3)
    late.nixl.deliver(late.nixl.reads[2])
    other.peer.done("b")
    assert acknowledged(other)
    for read in late.rig.receiver._transports[0]._under_way:
        read.until = 0.0
    reply = late.peer.read()
    assert isinstance(reply, KVFailed) and "no answer for 10 s" in reply.reason
    late.rig.memory[:] = 99
    for read in late.nixl.reads[:2]:
        late.nixl.deliver(read)
    assert (late.rig.memory == 99).all()
    wait_until(lambda: len(late.rig.events) == 2)
    late.rig.events.clear()
    assert late.expect((7,), "c").memory is None  # over TCP for a while
    late.peer.ship(0, 1, "c")
    late.peer.done("c")
    assert isinstance(late.peer.read(), KVAck) and bytes(late.rig.memory[7]) == late.peer.blocks[0]


def test_a_memory_that_failed_is_tried_again_later(late: RemoteSide, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_memories, "RETRY_S", 0.3)
    late.expect((7,))
    late.peer.name(0, [1])
    wait_until(lambda: late.nixl.reads)
    late.nixl.fail(late.nixl.reads[0])
    reply = late.peer.read()
    assert isinstance(reply, KVFailed) and "NIXL reports an error" in reply.reason
    assert isinstance(late.rig.event(), TransferFailed)
    assert late.expect((7,), "b").memory is None
    time.sleep(0.35)
    late.nixl.is_prompt = True
    assert isinstance(late.expect((3,), "c").memory, RemoteMemory)
    late.peer.name(0, [9], "c")
    late.peer.done("c")
    assert acknowledged(late)
    assert bytes(late.rig.memory[3]) == late.peer.blocks[9]


def test_a_read_that_cannot_begin_ends_its_transfer(side: RemoteSide) -> None:
    side.expect((7,))
    side.nixl.refuses = "NIXL cannot read: the keys are not known"
    side.peer.name(0, [1])
    reply = side.peer.read()
    assert isinstance(reply, KVFailed) and "the keys are not known" in reply.reason


@pytest.mark.parametrize(
    ("sources", "problem"),
    [
        ([64], "beyond the 4,096 bytes"),
        ([2**62], "beyond the 4,096 bytes"),
        ([1] * (blocks_per_message(BLOCK_BYTES) + 1), ""),
    ],
)
def test_what_was_not_offered_is_not_read(side: RemoteSide, sources: list[int], problem: str) -> None:
    transfer = side.expect()
    side.peer.name(0, sources)
    if problem:
        reply = side.peer.read()
        assert isinstance(reply, KVFailed) and problem in reply.reason
    side.rig.sync()  # a message with too many blocks is no message, and is dropped
    assert not side.nixl.reads and not transfer.received


def test_more_blocks_than_were_granted_are_not_read(side: RemoteSide) -> None:
    side.expect((7, 3))
    side.peer.name(1, [0, 1])
    assert "message names blocks 1 to 3 of 0 to 2" in side.peer.read().reason
    assert not side.nixl.reads and isinstance(side.rig.event(), TransferFailed)


def test_blocks_shorter_than_their_places_are_read_from_the_beginning(side: RemoteSide) -> None:
    slots = side.blocks.reshape(-1, 2 * BLOCK_BYTES)
    side.offered = OfferedMemory(
        side.nixl,  # type: ignore[arg-type]
        (slots.ctypes.data, slots.nbytes),
        is_ring=True,
        slot_bytes=2 * BLOCK_BYTES,
    )
    side.expect((7, 3))
    for place, number in enumerate((4, 1)):
        side.peer.name(place, [number], sums=[slots[number, :BLOCK_BYTES].tobytes()])
    side.peer.done()
    assert acknowledged(side)
    assert [bytes(side.rig.memory[index]) for index in (7, 3)] == [bytes(slots[n, :BLOCK_BYTES]) for n in (4, 1)]


def test_without_nixl_frames_are_asked_for(make_rig: Callable[..., Rig], caplog: pytest.LogCaptureFixture) -> None:
    side = RemoteSide(make_rig(), PretendedNixl(), is_ring=True)
    with caplog.at_level(logging.INFO):
        assert side.expect((7,)).memory is None
    assert "TCP (this worker's --kv-transport does not accept nixl)" in caplog.text
    side.peer.ship(0, 1)
    side.peer.done()
    assert isinstance(side.peer.read(), KVAck)


def test_broken_metadata_is_refused(side: RemoteSide, caplog: pytest.LogCaptureFixture) -> None:
    offer = side.offered.offer
    broken = offer.__class__("p", b"broken", offer.address, offer.num_bytes, True)
    with caplog.at_level(logging.INFO):
        assert side.rig.expect(side.peer, (7,), offer=KVOffer.of("nixl", broken)).memory is None
    assert "TCP (NIXL cannot reach p: its metadata is broken" in caplog.text


def test_a_new_duty_of_a_worker_leaves_its_old_memory(side: RemoteSide) -> None:
    side.expect((7,))
    first = side.offered.offer
    side.peer.open("b", 1, epoch=6, offer=KVOffer.of("nixl", first.__class__("second", *_rest(side))))
    wait_until(lambda: side.nixl.connected == ["second"])


# ---------------------------------------------------------------- who gets a slot


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def header(source: int = 0) -> KVBlocks:
    return KVBlocks(request_id="a", attempt=0, first_block=0, checksums=(0,), sources=(source,))


def test_one_memory_does_not_take_all_slots() -> None:
    nixl, clock = PretendedNixl(is_prompt=False), Clock()
    reads = RemoteReads(nixl, BLOCK_BYTES, clock)  # type: ignore[arg-type]
    source = np.zeros((4, BLOCK_BYTES), np.uint8)
    offers = [OfferedMemory(nixl, (source.ctypes.data, source.nbytes), is_ring=True).offer for _ in range(2)]  # type: ignore[arg-type]
    silent, lively = (
        reads.accept(offer.__class__(name, *_fields(offer))) for name, offer in zip("sl", offers, strict=True)
    )
    assert reads.poll_ms is None
    for _ in range(NUM_SLOTS + 3):
        assert reads.begin(b"s", header(), silent, [BLOCK_BYTES]) == ""
    assert reads.begin(b"l", header(), lively, [BLOCK_BYTES]) == ""
    assert [read.peer for read in nixl.reads] == ["s"] * MOST_OF_ONE + ["l"] and reads.poll_ms == 1
    nixl.deliver(nixl.reads[-1])
    assert [read.peer for read in reads.ended()] == [b"l"]
    clock.now = transport.READ_S + 1
    assert {(read.peer, read.problem) for read in reads.ended()} == {
        (b"s", "reading from s failed: no answer for 10 s")
    }
    assert reads.poll_ms is None and reads.begin(b"s", header(), silent, [BLOCK_BYTES]) == silent.failed
    for _ in range(NUM_SLOTS):  # the slots of the silent one are put aside
        reads.begin(b"l", header(), lively, [BLOCK_BYTES])
    assert sum(read.peer == "l" for read in nixl.reads) == 1 + MOST_OF_ONE
    reads.close()
    assert len(nixl.kept) == 1  # memory to which bytes may still come


def test_messages_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "MAX_WAITING", 3)
    nixl = PretendedNixl(is_prompt=False)
    reads = RemoteReads(nixl, BLOCK_BYTES)  # type: ignore[arg-type]
    source = np.zeros((4, BLOCK_BYTES), np.uint8)
    memory = reads.accept(OfferedMemory(nixl, (source.ctypes.data, source.nbytes), is_ring=False).offer)  # type: ignore[arg-type]
    problems = [reads.begin(b"p", header(), memory, [BLOCK_BYTES]) for _ in range(MOST_OF_ONE + 4)]
    assert (
        problems[:-1] == [""] * (MOST_OF_ONE + 3) and problems[-1] == "too many messages waiting to be read (limit 3)"
    )
    for read in nixl.reads:
        nixl.deliver(read)
    assert sum(1 for _ in reads.ended()) == MOST_OF_ONE and len(nixl.reads) == MOST_OF_ONE + 3
    for read in nixl.reads:
        nixl.deliver(read)
    assert sum(1 for _ in reads.ended()) == 3
    reads.close()
    assert len(nixl.registered) == 1 and not nixl.kept  # the offered memory alone


def _rest(side: RemoteSide) -> tuple[Any, ...]:
    return _fields(side.offered.offer)


def _fields(offer: Any) -> tuple[Any, ...]:
    return offer.metadata, offer.address, offer.num_bytes, offer.is_ring


def test_a_memory_that_fails_again_and_again_leaves_half_of_the_slots() -> None:
    nixl, clock = PretendedNixl(is_prompt=False), Clock()
    reads = RemoteReads(nixl, BLOCK_BYTES, clock)  # type: ignore[arg-type]
    source = np.zeros((4, BLOCK_BYTES), np.uint8)
    offer = OfferedMemory(nixl, (source.ctypes.data, source.nbytes), is_ring=True).offer  # type: ignore[arg-type]
    lively = reads.accept(offer.__class__("l", *_fields(offer)))
    for attempt in range(1, 4):  # each time as soon as it may be tried again
        silent = reads.accept(offer.__class__("s", *_fields(offer)))
        for _ in range(NUM_SLOTS):
            reads.begin(b"s", header(), silent, [BLOCK_BYTES])
        clock.now += transport.READ_S + 1
        assert all(read.problem for read in reads.ended())
        reads.begin(b"l", header(), lively, [BLOCK_BYTES])
        assert sum(read.peer == "l" for read in nixl.reads) == attempt
        nixl.deliver(nixl.reads[-1])
        assert [read.peer for read in reads.ended()] == [b"l"]
        clock.now += peer_memories.RETRY_S
        list(reads.ended())
