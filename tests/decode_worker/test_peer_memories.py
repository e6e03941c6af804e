"""Which prefill workers' memories a decode worker has mapped, and for how long."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import msgspec
import pytest
import zmq

from diptych.common.messages import KVOpen
from diptych.common.shared_memory import SharedMemory
from diptych.decode_worker import peer_memories
from diptych.decode_worker.peer_memories import PeerMemories


@pytest.fixture
def memory() -> SharedMemory:
    return SharedMemory(4096)


@pytest.fixture
def memories() -> Iterator[PeerMemories]:
    memories = PeerMemories(share=True)
    memories.watch(zmq.Poller())
    yield memories
    memories.close()


def opened(memory: SharedMemory | None, *, epoch: int = 1, worker: str = "p", nonce: bytes = b"") -> KVOpen:
    offer = memory.offer if memory else None
    if offer and nonce:
        offer = msgspec.structs.replace(offer, nonce=nonce)
    return KVOpen(
        request_id="a", attempt=0, worker_id=worker, epoch=epoch, decode_epoch=7, fingerprint="f", num_blocks=1,
        memory=offer,
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
    assert second is not None and second is not first and second.offer == other.offer


def test_a_wrong_offer_is_refused_once_and_does_no_harm(
    memories: PeerMemories, memory: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert memories.of(opened(memory, nonce=b"x" * 16)) is None
    assert memories.of(opened(memory)) is not None
    monkeypatch.setattr(peer_memories, "PeerMemory", None)  # not tried again: that would fail
    assert memories.of(opened(memory, nonce=b"x" * 16)) is None


def test_no_offer_and_no_wish_to_share(memories: PeerMemories, memory: SharedMemory) -> None:
    assert memories.of(opened(None)) is None
    assert PeerMemories(share=False).of(opened(memory)) is None


def test_a_dead_owner_is_unmapped_and_the_others_stay(memories: PeerMemories, memory: SharedMemory) -> None:
    files = num_files()
    dead, alive = memories.of(opened(memory)), memories.of(opened(memory, worker="q"))
    assert dead is not None and alive is not None
    memories.drop_dead({dead.process: zmq.POLLIN})
    assert dead.closed and not alive.closed
    memories.close()
    assert alive.closed and num_files() == files


def test_hostile_offers_are_not_remembered_for_ever(
    memories: PeerMemories, memory: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_memories, "MAX_WORKERS", 4)
    first, files = memories.of(opened(memory)), num_files()
    assert first is not None
    for number in range(20):
        memories.of(opened(memory, worker=f"h{number}", nonce=b"x" * 16))
        assert memories.of(opened(memory)) is first  # in use: it stays
    for number in range(20):
        memories.of(opened(memory, worker=f"p{number}"))
    assert first.closed and num_files() <= files + 2 * (4 - 1)
