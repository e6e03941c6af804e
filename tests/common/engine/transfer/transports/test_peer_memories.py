"""Which prefill workers' memories a decode worker has mapped, and for how long."""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Iterator

import msgspec
import pytest
import zmq

from common.engine.kv.shared_memory import SharedMemory
from common.engine.transfer import peer_memories
from common.engine.transfer.peer_memories import PeerMemories
from common.engine.transfer.transports import shm
from common.engine.transfer.transports.shm import PeerMemory, SharedReads
from common.errors import WireError
from common.wire.messages import KVOffer, KVOpen


@pytest.fixture
def memory() -> SharedMemory:
    return SharedMemory(4096)


@pytest.fixture
def memories() -> Iterator[PeerMemories]:
    memories = PeerMemories([SharedReads()])
    memories.watch(zmq.Poller())
    yield memories
    memories.close()


def opened(memory: SharedMemory | None, *, epoch: int = 1, worker: str = "p", nonce: bytes = b"") -> KVOpen:
    offer = memory.offer if memory else None
    if offer and nonce:
        offer = msgspec.structs.replace(offer, nonce=nonce)
    return KVOpen(
        request_id="a", attempt=0, worker_id=worker, epoch=epoch, decode_epoch=7, fingerprint="f", num_blocks=1,
        offer=KVOffer.of("shm", offer) if offer else None,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def files_of_other_tests_stay() -> Iterator[None]:
    """What tests before these left to the garbage collector is not closed while files are counted here."""
    gc.disable()
    yield
    gc.enable()


def num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_an_offer_is_opened_once(memories: PeerMemories, memory: SharedMemory) -> None:
    first = memories.of(opened(memory))
    assert first is not None
    assert memories.of(opened(memory)) is first


def test_a_restarted_worker_is_mapped_again(memories: PeerMemories, memory: SharedMemory) -> None:
    first, other = memories.of(opened(memory)), SharedMemory(8192)
    second = memories.of(opened(other, epoch=2))
    assert isinstance(second, PeerMemory) and second is not first and second.offer == other.offer


def test_a_wrong_offer_is_refused_once_and_does_no_harm(
    memories: PeerMemories, memory: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert memories.of(opened(memory, nonce=b"x" * 16)) is None
    assert memories.of(opened(memory)) is not None
    monkeypatch.setattr(shm, "PeerMemory", None)  # not tried again: that would fail
    assert memories.of(opened(memory, nonce=b"x" * 16)) is None


def test_no_offer_and_no_wish_to_share(memories: PeerMemories, memory: SharedMemory) -> None:
    assert memories.of(opened(None)) is None
    assert PeerMemories(()).of(opened(memory)) is None


def test_an_offer_of_a_transport_that_is_not_used_here_is_refused(
    memories: PeerMemories, memory: SharedMemory, caplog: pytest.LogCaptureFixture
) -> None:
    """A later version may add transports: frames are asked for."""
    message = msgspec.structs.replace(opened(memory), offer=KVOffer("teleport", b"no msgpack"))
    with caplog.at_level("INFO"):
        assert memories.of(message) is None
    assert "KV transfer from p: TCP (this worker's --kv-transport does not accept teleport)" in caplog.text


@pytest.mark.parametrize("details", [b"", b"no msgpack", msgspec.msgpack.encode((0, 1, 1, b"n" * 16))])
def test_a_malformed_offer_is_no_message(memories: PeerMemories, memory: SharedMemory, details: bytes) -> None:
    """It also leaves the memory that the worker offered before."""
    first = memories.of(opened(memory))
    message = msgspec.structs.replace(opened(memory, epoch=2), offer=KVOffer("shm", details))
    with pytest.raises(WireError, match="invalid offer of transport shm"):
        memories.of(message)
    assert isinstance(first, PeerMemory) and not first.closed


def test_a_dead_owner_is_unmapped_and_the_others_stay(memories: PeerMemories, memory: SharedMemory) -> None:
    files = num_files()
    dead, alive = memories.of(opened(memory)), memories.of(opened(memory, worker="q"))
    assert isinstance(dead, PeerMemory) and isinstance(alive, PeerMemory)
    memories.drop_dead({dead.process: zmq.POLLIN})
    assert dead.closed and not alive.closed
    memories.close()
    assert alive.closed and num_files() == files


def test_hostile_offers_are_not_remembered_for_ever(
    memories: PeerMemories, memory: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_memories, "MAX_WORKERS", 4)
    first, files = memories.of(opened(memory)), num_files()
    assert isinstance(first, PeerMemory)
    for number in range(20):
        memories.of(opened(memory, worker=f"h{number}", nonce=b"x" * 16))
        assert memories.of(opened(memory)) is first  # in use: it stays
    for number in range(20):
        memories.of(opened(memory, worker=f"p{number}"))
    assert first.closed and num_files() <= files + 2 * (4 - 1)


def test_a_refused_offer_is_tried_again_and_logged_once(
    memory: SharedMemory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now, soft = 0.0, resource.getrlimit(resource.RLIMIT_NOFILE)
    memories = PeerMemories([SharedReads()], clock=lambda: now)
    with caplog.at_level("INFO"):
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, soft[1]))  # no more files for a while
        try:
            assert memories.of(opened(memory)) is None
            now += peer_memories.RETRY_S
            assert memories.of(opened(memory)) is None
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, soft)
        assert memories.of(opened(memory)) is None  # refused a moment ago
        now += peer_memories.RETRY_S
        assert memories.of(opened(memory)) is not None
    memories.close()
    lines = [record.message for record in caplog.records]
    assert len(lines) == 2 and "Too many open files" in lines[0] and "shared memory" in lines[1]
