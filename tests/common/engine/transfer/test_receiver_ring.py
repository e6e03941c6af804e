"""A receiver that copies out of a ring: what it gives back when, and that it never takes what was overwritten."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import zmq

from common.engine.kv.shared_memory import SharedMemory
from common.engine.transfer.peer_memories import PeerMemories
from common.engine.transfer.receiver import TransferCompleted, TransferFailed
from common.engine.transfer.transports import shm
from common.engine.transfer.transports.shm import PeerMemory, SharedReads
from common.wire.messages import KVAck, KVFailed, KVOffer, KVOpen, KVTaken

from ....late_stream import LateStream, reach_into

Rig = Any


@pytest.fixture
def device() -> LateStream:
    return LateStream()


@pytest.fixture(params=["host", "device"])
def rig(make_rig: Callable[..., Rig], device: LateStream, request: pytest.FixtureRequest) -> Rig:
    """Its cache is in host memory, or on the device."""
    if request.param == "device":
        return with_device(make_rig, device)
    rig = make_rig()
    rig.peer().share(is_ring=True)
    return rig


def with_device(make_rig: Callable[..., Rig], device: LateStream, *, is_ring: bool = True) -> Rig:
    rig = make_rig(transports=lambda memory: [SharedReads(reach_into(memory, device))])
    rig.peer().share(is_ring=is_ring)
    return rig


@pytest.fixture
def on_device(make_rig: Callable[..., Rig], device: LateStream) -> Rig:
    return with_device(make_rig, device)


def test_places_are_given_back_once_their_blocks_are_here(rig: Rig) -> None:
    peer = rig.peers[0]
    rig.expect(peer, (7, 3, 5, 1))
    peer.name(0, [9, 2])
    assert peer.read() == KVTaken(request_id="a", attempt=0, places=(9, 2))
    assert [bytes(rig.memory[block]) for block in (7, 3)] == [peer.blocks[9], peer.blocks[2]]
    peer.shared.pages[9 * rig.block_bytes] = 0  # filled again: what was copied stays
    peer.name(2, [4, 4])
    peer.done()
    assert peer.read() == KVTaken(request_id="a", attempt=0, places=(4, 4))  # before the end was known
    assert isinstance(peer.read(), KVAck)
    assert isinstance(rig.event(), TransferCompleted)
    assert bytes(rig.memory[7]) == peer.blocks[9] and bytes(rig.memory[1]) == peer.blocks[4]


def test_the_last_places_end_with_the_transfer(rig: Rig) -> None:
    peer = rig.peers[0]
    rig.expect(peer, (7,))
    peer.done()
    peer.name(0, [9])
    assert isinstance(peer.read(), KVAck)
    rig.sync()
    assert not peer.socket.poll(50)


def test_what_is_overwritten_before_it_is_copied_is_not_taken(rig: Rig) -> None:
    peer = rig.peers[0]
    rig.expect(peer)
    peer.shared.pages[2 * rig.block_bytes + 5] ^= 1
    peer.name(0, [1, 2])
    reply = peer.read()
    assert isinstance(reply, KVFailed) and "block 1 is corrupt" in reply.reason
    failed = rig.event()
    assert isinstance(failed, TransferFailed) and not failed.by_peer


@pytest.mark.parametrize("part", [1, 2, 3, 4])
def test_what_is_overwritten_while_it_is_copied_is_not_taken(on_device: Rig, device: LateStream, part: int) -> None:
    """Part 1 to 4 has just been copied: the checksum is of what is there afterwards."""
    peer = on_device.peers[0]
    transfer = on_device.expect(peer)

    def overwrite() -> None:
        if device.num_parts == part:
            begin = 2 * on_device.block_bytes
            peer.shared.pages[begin : begin + on_device.block_bytes] = b"x" * on_device.block_bytes

    device.on_part = overwrite
    peer.name(0, [2])
    assert isinstance(peer.read(), KVFailed) and not transfer.received


def test_a_place_that_does_not_exist_is_not_read(rig: Rig) -> None:
    peer = rig.peers[0]
    rig.expect(peer)
    peer.name(0, [len(peer.blocks)])
    reply = peer.read()
    assert isinstance(reply, KVFailed) and "cannot be read" in reply.reason


def test_blocks_that_came_too_late_are_given_back_unread(rig: Rig) -> None:
    peer = rig.peers[0]
    rig.expect(peer)
    rig.receiver.release("a", 0)
    rig.memory[:] = 99
    peer.name(0, [1, 2])
    assert peer.read() == KVTaken(request_id="a", attempt=0, places=(1, 2))
    assert (rig.memory == 99).all()


def test_frames_are_taken_beside_places(rig: Rig) -> None:
    """The sender had no place left."""
    peer = rig.peers[0]
    rig.expect(peer, (0, 1, 2, 3))
    peer.name(0, [1])
    assert isinstance(peer.read(), KVTaken)
    peer.ship(1, 3)
    peer.done()
    assert isinstance(peer.read(), KVAck)
    assert [bytes(block) for block in rig.memory[:4]] == peer.blocks[1:2] + peer.blocks[1:4]


def test_a_cache_of_host_memory_reaches_a_device_through_buffers(
    make_rig: Callable[..., Rig], device: LateStream, caplog: pytest.LogCaptureFixture
) -> None:
    """A whole cache is too much to pin, and its blocks need no giving back."""
    on_device = with_device(make_rig, device, is_ring=False)
    peer = on_device.peers[0]
    with caplog.at_level(logging.INFO):
        on_device.expect(peer, (7, 3))
    peer.name(0, [9])
    peer.done()
    peer.name(1, [2])
    assert isinstance(peer.read(), KVAck)
    assert [bytes(on_device.memory[block]) for block in (7, 3)] == [peer.blocks[9], peer.blocks[2]]
    assert not device.registered and "a whole cache, too large to pin" in caplog.text


def test_a_driver_that_registers_no_read_only_memory(
    make_rig: Callable[..., Rig], caplog: pytest.LogCaptureFixture
) -> None:
    device = LateStream(refuses=True)
    rig = with_device(make_rig, device)
    peer = rig.peers[0]
    with caplog.at_level(logging.INFO):
        rig.expect(peer, (7,))
    peer.name(0, [9])
    assert isinstance(peer.read(), KVTaken)
    assert bytes(rig.memory[7]) == peer.blocks[9] and not device.num_parts
    assert "shared memory, staged in host buffers: this driver registers no memory" in caplog.text


# ---------------------------------------------------------------- how long a ring stays mapped, and registered


@pytest.fixture
def memories(device: LateStream) -> Iterator[PeerMemories]:
    memories = PeerMemories([SharedReads(reach_into(np.zeros((4, 64), np.uint8), device))])
    memories.watch(zmq.Poller())
    yield memories
    memories.close()
    assert not device.registered


def opened(ring: SharedMemory, *, epoch: int = 1, worker: str = "p") -> KVOpen:
    return KVOpen(
        request_id="a", attempt=0, worker_id=worker, epoch=epoch, decode_epoch=7, fingerprint="f", num_blocks=1,
        offer=KVOffer.of("shm", ring.offer),
    )  # fmt: skip


def test_a_ring_is_registered_read_only_until_its_owner_dies(memories: PeerMemories, device: LateStream) -> None:
    ring = SharedMemory(4096, is_ring=True)
    memory = memories.of(opened(ring))
    assert isinstance(memory, PeerMemory) and memory.is_ring and memory.reached is not None
    assert device.registered == {memory.address: (4096, True)}
    memories.drop_dead({memory.process: zmq.POLLIN})
    assert memory.closed and memory.reached is None and not device.registered


def test_a_worker_that_changes_its_role_leaves_no_ring_mapped(memories: PeerMemories, device: LateStream) -> None:
    rings = [SharedMemory(4096, is_ring=True) for _ in range(3)]
    first, other = memories.of(opened(rings[0])), memories.of(opened(rings[2], worker="q"))
    second = memories.of(opened(rings[1], epoch=2))
    assert isinstance(first, PeerMemory) and isinstance(second, PeerMemory) and isinstance(other, PeerMemory)
    assert first.closed and not second.closed and not other.closed
    assert device.registered.keys() == {second.address, other.address}


def test_a_huge_ring_is_not_pinned(memories: PeerMemories, device: LateStream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm, "MOST_REACHED", 4095)
    ring = SharedMemory(4096, is_ring=True)
    memory = memories.of(opened(ring))
    assert isinstance(memory, PeerMemory) and memory.reached is None and not device.registered
