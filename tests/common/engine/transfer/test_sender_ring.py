"""A sender whose blocks leave through places: when it fills them, and that no silent receiver holds them for ever."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from common.engine.kv.block_ring import BlockRing
from common.engine.transfer.transports.shm import PeerMemory
from common.wire.messages import KVBlocks, KVDone, KVOffer, KVTaken

from ....late_stream import LateStream, ring_over
from ....waiting import wait_until
from .sender_rig import DecodeSide

Rig = Any
BLOCK_BYTES, NUM_PLACES = 64, 4


@pytest.fixture
def rig(make_sender_rig: Callable[..., Rig]) -> Rig:
    return make_sender_rig()


@pytest.fixture
def device() -> LateStream:
    return LateStream()


@pytest.fixture
def ring(device: LateStream) -> Iterator[BlockRing]:
    rows = np.random.default_rng(0).integers(0, 255, (16, BLOCK_BYTES), np.uint8)
    ring = ring_over(rows, NUM_PLACES, device)
    yield ring
    ring.check_integrity()
    assert not device.registered


@pytest.fixture
def make(ring: BlockRing, make_sender_rig: Callable[..., Rig]) -> Callable[..., Rig]:
    return lambda **options: make_sender_rig(ring=ring, **options)


def granted(rig: Rig, name: str = "a", blocks: int = 6) -> None:
    rig.open(name, blocks, num_ready=blocks)
    rig.finish(name, blocks)
    rig.read_open()
    rig.grant(name, shared=True)


def give_back(rig: Rig, places: tuple[int, ...], name: str = "a") -> None:
    rig.reply(KVTaken(request_id=name, attempt=0, places=places))


def header(rig: DecodeSide) -> KVBlocks:
    message, frames = rig.read()
    assert isinstance(message, KVBlocks) and not frames
    return message


def contents(memory: PeerMemory, place: int) -> bytes:
    target = bytearray(BLOCK_BYTES)
    assert memory.read(place, memoryview(target))
    return bytes(target)


def test_places_are_filled_as_they_are_given_back(make: Callable[..., Rig], ring: BlockRing) -> None:
    rig = make()
    rig.open("a", 6, num_ready=6)
    rig.finish("a", 6)
    opened = rig.read_open()
    assert opened.offer == KVOffer.of("shm", ring.offer) and ring.offer.is_ring
    memory = PeerMemory(ring.offer)
    rig.grant(shared=True)
    first = header(rig)
    assert (first.first_block, len(first.sources)) == (0, NUM_PLACES)
    assert [contents(memory, place) for place in first.sources] == [bytes(rig.memory[block]) for block in range(4)]
    assert not rig.router.poll(100), "a place was filled before it was given back"
    give_back(rig, first.sources[1:3])
    second = header(rig)
    assert (second.first_block, second.sources) == (4, first.sources[1:3])
    assert [contents(memory, place) for place in second.sources] == [bytes(rig.memory[block]) for block in (4, 5)]
    assert contents(memory, first.sources[0]) == bytes(rig.memory[0]), "a place was overwritten before its time"
    assert isinstance(rig.read()[0], KVDone) and ring.num_free == 0
    rig.ack()
    wait_until(lambda: rig.ended)
    assert ring.num_free == NUM_PLACES and rig.ended[0].transport == "shm" and rig.sender.num_bytes == 6 * BLOCK_BYTES
    memory.close()


def test_places_of_another_transfer_cannot_be_given_back(make: Callable[..., Rig], ring: BlockRing) -> None:
    rig = make()
    granted(rig)
    places = header(rig).sources
    granted(rig, "b")
    give_back(rig, places, "b")
    give_back(rig, (99,))
    wait_until(lambda: rig.sender.num_dropped_frames == 2)
    assert not rig.router.poll(50) and ring.num_free == 0


def test_a_receiver_that_keeps_all_places_delays_no_other(make: Callable[..., Rig], ring: BlockRing) -> None:
    rig, other = make(), DecodeSide()
    granted(rig)
    kept = header(rig).sources
    try:
        rig.sender.open("b", 0, other.target, [7, 8], 2)
        rig.sender.progress("b", 0, 2, KVDone(request_id="b", attempt=0, first_token=3))
        other.read_open()
        other.grant("b", shared=True)
        message, frames = other.read()
        assert isinstance(message, KVBlocks) and not message.sources
        assert frames == [bytes(rig.memory[7]), bytes(rig.memory[8])]
        other.read()
        other.ack("b")
        wait_until(lambda: rig.ended)
        assert (rig.ended[0].request_id, rig.ended[0].reason) == ("b", "")
        assert sorted(kept) == list(range(NUM_PLACES)) and ring.num_free == 0
    finally:
        other.router.close()
        other.context.term()


def test_nothing_leaves_in_frames_where_memory_is_required(make: Callable[..., Rig], ring: BlockRing) -> None:
    rig, other = make(require_shared=True), DecodeSide()
    granted(rig)
    places = header(rig).sources
    try:
        rig.sender.open("b", 0, other.target, [7], 1)
        other.read_open()
        other.grant("b", shared=True)
        assert not other.router.poll(100)
        give_back(rig, places[:1])
        header(rig)  # the first transfer has its turn first
        give_back(rig, places)
        assert len({*header(rig).sources, *header(other).sources}) == 2
    finally:
        other.router.close()
        other.context.term()


@pytest.mark.parametrize("how", ["cancelled", "refused", "lease"])
def test_places_are_free_however_a_transfer_ends(make: Callable[..., Rig], ring: BlockRing, how: str) -> None:
    rig = make(lease_s=3.0 if how == "lease" else 30.0)
    granted(rig)
    header(rig)
    if how == "cancelled":
        rig.sender.cancel("a", 0, "aborted")
    elif how == "refused":
        rig.fail()
    wait_until(lambda: ring.num_free == NUM_PLACES)
    assert rig.read_failed().reason if how != "refused" else rig.ended


def test_a_receiver_that_cannot_map_the_ring_gets_frames(make: Callable[..., Rig], ring: BlockRing) -> None:
    rig = make()
    rig.open(num_ready=4)
    rig.read_open()
    rig.grant()
    message, frames = rig.read()
    assert not message.sources and len(frames) == 4 and ring.num_free == NUM_PLACES


def test_blocks_that_were_taken_back_while_they_were_copied_do_not_leave(
    make: Callable[..., Rig], ring: BlockRing, device: LateStream
) -> None:
    rig = make()
    device.on_part = lambda: rig.sender.cancel("a", 0, "aborted")
    granted(rig)
    assert rig.read_failed().reason == "aborted"
    wait_until(lambda: ring.num_free == NUM_PLACES)
    assert device.num_parts and rig.sender.num_bytes == 0


def test_places_come_back_unasked_for_blocks_of_the_cache(rig: Rig) -> None:
    """A receiver drops blocks that came too late and says so, whatever they were."""
    rig.open(num_ready=4)
    rig.read_open()
    rig.grant()
    rig.read()
    give_back(rig, (1, 2))
    rig.finish()
    assert isinstance(rig.read()[0], KVDone) and rig.sender.num_dropped_frames == 0
