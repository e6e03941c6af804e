"""The receiver against prefill workers that the test plays, honest and otherwise, over real sockets."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import zmq
from msgspec import structs

from common.engine.transfer import receiver
from common.engine.transfer.receiver import KVListener, KVReceiver, TransferCompleted, TransferFailed, TransferOpened
from common.errors import BlockError
from common.wire.messages import KVAck, KVBlocks, KVDone, KVFailed, KVGrant, KVOffer, KVWait

from ....engine_rig import WAIT_S, PlainBlocks, wait

Rig = Any  # ReceiverRig and Peer of conftest, which test modules cannot import
Peer = Any


def received_exactly(rig: Rig, peer: Peer, blocks: range) -> bool:
    return all(bytes(rig.memory[block]) == peer.blocks[i] for i, block in enumerate(blocks))


def fails(rig: Rig, peer: Peer, name: str = "a") -> str:
    """The transfer failed on both sides, and another one on the same connection still works."""
    answer, event = peer.read(), rig.event()
    assert isinstance(answer, KVFailed) and isinstance(event, TransferFailed)
    assert (event.request_id, event.by_peer) == (name, False)
    assert rig.receiver.release(name, 0) is None
    rig.expect(peer, range(16, 18), "next")
    peer.ship(0, 2, "next")
    peer.done("next")
    assert isinstance(peer.read(), KVAck)
    assert isinstance(rig.event(), TransferCompleted)
    return answer.reason


def test_blocks_land_where_they_were_expected(rig: Rig, peer: Peer) -> None:
    transfer = rig.expect(peer, range(8, 12))
    peer.ship(0, 1)
    peer.ship(1, 3)
    peer.done()
    assert peer.read() == KVAck(request_id="a", attempt=0)
    assert rig.event() == TransferCompleted(transfer)
    assert received_exactly(rig, peer, range(8, 12))
    assert not rig.memory[:8].any() and not rig.memory[12:].any()
    assert rig.receiver.num_bytes == 4 * 64


def test_only_missing_blocks_are_needed(rig: Rig, peer: Peer) -> None:
    rig.expect(peer, first=3)
    peer.ship(3, 1)
    peer.done()
    assert isinstance(rig.event(), TransferCompleted)


def test_a_full_hit_needs_the_end_only(rig: Rig, peer: Peer) -> None:
    rig.expect(peer, first=4)
    peer.done()
    assert isinstance(peer.read(), KVAck)
    assert isinstance(rig.event(), TransferCompleted)


def test_the_end_may_overtake_blocks(rig: Rig, peer: Peer) -> None:
    rig.expect(peer)
    peer.done()
    peer.ship(2, 2)
    peer.ship(0, 2)
    assert isinstance(rig.event(), TransferCompleted)
    assert received_exactly(rig, peer, range(4))


def test_blocks_may_come_over_several_connections(rig: Rig, peer: Peer) -> None:
    other = rig.peer()
    rig.expect(peer)
    other.ship(0, 2)
    peer.ship(2, 2)
    peer.done()
    assert isinstance(rig.event(), TransferCompleted)


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        pytest.param([0, 1, b"x" * 64, 3], "block 2 is corrupt", id="corrupt"),
        pytest.param([0, 1, 3, 2], "block 2 is corrupt", id="misordered"),
        pytest.param([0, 1, b"x" * 63, 3], "block 2 has 63 bytes instead of 64", id="short"),
        pytest.param([0, 1, b"", 3], "block 2 has 0 bytes", id="empty"),
        pytest.param([0, 1, b"x" * 65, 3], "block 2 has 65 bytes", id="long"),
        pytest.param([0, 1], "4 blocks announced, 2 received", id="missing"),
        pytest.param([], "4 blocks announced, 0 received", id="none"),
        pytest.param([0, 1, 2, 3, 4, 5], "2 frames more than the 4", id="extra"),
    ],
)
def test_wrong_frames_fail_that_transfer_only(rig: Rig, peer: Peer, frames: list[int | bytes], reason: str) -> None:
    rig.expect(peer)
    peer.ship(0, 4, frames=[peer.blocks[frame] if isinstance(frame, int) else frame for frame in frames])
    assert reason in fails(rig, peer)


def test_a_missing_message_never_completes(rig: Rig, peer: Peer) -> None:
    transfer = rig.expect(peer)
    peer.ship(0, 3)
    peer.done()
    rig.sync()
    assert not rig.events
    assert rig.receiver.stalled(transfer.last_progress + 1) == [transfer]
    assert (transfer.num_missing, transfer.num_prefix_received) == (1, 3)


def test_frames_after_the_blocks_were_reused_do_no_harm(rig: Rig, peer: Peer) -> None:
    rig.expect(peer)
    peer.ship(0, 2)
    rig.sync()
    assert rig.receiver.release("a", 0).received == {0, 1}
    rig.memory[:] = 99
    peer.ship(2, 2)
    peer.ship(0, 2)
    peer.done()
    rig.sync()
    assert (rig.memory == 99).all()
    assert not rig.events
    assert rig.receiver.num_dropped_frames == 3


def test_frames_of_an_older_attempt_do_no_harm(rig: Rig, peer: Peer) -> None:
    rig.expect(peer, attempt=1)
    peer.ship(0, 4, attempt=0)
    peer.done(attempt=0)
    rig.sync()
    assert not rig.memory.any() and not rig.events


def test_a_second_frame_for_a_block_is_ignored(rig: Rig, peer: Peer) -> None:
    rig.expect(peer)
    peer.ship(0, 3)
    peer.ship(0, 3, frames=[b"x" * 64] * 3)
    peer.ship(3, 1)
    peer.done()
    assert isinstance(rig.event(), TransferCompleted)
    assert received_exactly(rig, peer, range(4))


@pytest.mark.parametrize("num_blocks", [1, 5])
def test_an_end_that_names_more_or_fewer_blocks_than_there_can_be_fails(rig: Rig, peer: Peer, num_blocks: int) -> None:
    rig.expect(peer, first=2)
    peer.ship(2, 2)
    peer.send(
        KVDone(request_id="a", attempt=0, first_token=3, num_blocks=num_blocks, token=peer.tokens.get(("a", 0), 0))
    )
    failed = rig.event()
    assert (
        isinstance(failed, TransferFailed) and f"invalid number of blocks {num_blocks}: must be 2 to 4" in failed.reason
    )
    assert isinstance(peer.read(), KVFailed)


def test_blocks_outside_of_the_grant_are_not_written(rig: Rig, peer: Peer) -> None:
    rig.expect(peer, range(8, 12), first=2)
    peer.ship(0, 8)
    peer.done()
    assert isinstance(rig.event(), TransferCompleted)
    assert received_exactly(rig, peer, range(8, 12)) is False
    assert not rig.memory[:10].any() and not rig.memory[12:].any()


def test_the_end_counts_once(rig: Rig, peer: Peer) -> None:
    rig.expect(peer)
    peer.done()
    peer.done()
    peer.ship(0, 4)
    peer.done()
    rig.sync()
    assert [type(event) for event in rig.events] == [TransferCompleted]
    assert rig.receiver.num_dropped_frames == 2


@pytest.mark.parametrize(
    "parts",
    [
        [b""],
        [b"\xc1", b"frame"],
        [b"\x91" * 5000],
        pytest.param([b"\xc1", *[b"x"] * 50], id="many parts"),
    ],
)
def test_garbage_is_dropped(rig: Rig, peer: Peer, parts: list[bytes]) -> None:
    rig.expect(peer)
    peer.send(parts[0], *parts[1:])
    peer.ship(0, 4)
    peer.done()
    assert isinstance(rig.event(), TransferCompleted)
    assert rig.receiver.num_dropped_frames == 1


def test_messages_with_frames_behind_them_are_dropped(rig: Rig, peer: Peer) -> None:
    peer.send(KVFailed(request_id="a", attempt=0, reason="x"), b"frame")
    peer.send(KVGrant(request_id="a", attempt=0, first_block=0))
    peer.send(KVWait(request_id="a", attempt=0))
    rig.sync()
    assert not rig.events
    assert rig.receiver.num_dropped_frames == 3


def test_unknown_blocks_are_read_off_the_socket(rig: Rig, peer: Peer) -> None:
    for first_block in (0, 2**62):
        peer.send(KVBlocks(request_id="?", attempt=0, first_block=first_block, checksums=(1, 2)), b"x", b"y", b"z")
    rig.sync()
    assert rig.receiver.num_dropped_frames == 2


def test_a_peer_that_gives_up_is_reported(rig: Rig, peer: Peer) -> None:
    transfer = rig.expect(peer)
    peer.send(KVFailed(request_id="a", attempt=0, reason="lease expired", phase="grammar"))
    assert rig.event() == TransferFailed("a", 0, "lease expired", by_peer=True, peer=transfer.peer, phase="grammar")


def test_answers_to_a_peer_that_is_gone_do_no_harm(rig: Rig, peer: Peer) -> None:
    rig.receiver.send(b"nobody", KVAck(request_id="a", attempt=0))
    rig.expect(peer)
    assert rig.receiver.failure is None


def test_a_sign_of_life_counts_as_progress(rig: Rig, peer: Peer) -> None:
    transfer = rig.expect(peer)
    before = transfer.last_progress + 1
    assert rig.receiver.stalled(before)
    rig.receiver.touch("a", 0, before)
    rig.receiver.touch("unknown", 0, before)
    assert not rig.receiver.stalled(before)


def test_announcements_carry_where_to_answer(rig: Rig, peer: Peer) -> None:
    peer.open("a", 3)
    event = rig.event()
    assert isinstance(event, TransferOpened) and event.message.num_blocks == 3
    rig.receiver.send(event.peer, KVFailed(request_id="a", attempt=0, reason="no"))
    assert isinstance(peer.read(), KVFailed)


def test_blocks_of_shared_memory_are_copied_where_they_were_expected(rig: Rig, peer: Peer) -> None:
    peer.share()
    rig.expect(peer, range(8, 12), first=1)
    peer.name(0, [40, 5])  # block 0 is here already
    peer.name(2, [63, 0])
    peer.done()
    assert isinstance(peer.read(), KVAck)
    assert isinstance(rig.event(), TransferCompleted)
    assert [bytes(rig.memory[block]) for block in range(9, 12)] == [peer.blocks[i] for i in (5, 63, 0)]
    assert not rig.memory[:9].any() and not rig.memory[12:].any()


@pytest.mark.parametrize(
    ("sources", "sums", "reason"),
    [
        pytest.param([0, 1, 64], (), "block 2: source block 64 cannot be read", id="behind the last block"),
        pytest.param([2**62], (), "cannot be read", id="far away"),
        pytest.param([0, 1, 2], [b"x"], "1 checksums for 3 blocks", id="too many names"),
        pytest.param([0], [b"x", b"y"], "2 checksums for 1 blocks", id="too few names"),
        pytest.param([0, 1, 3], [bytes([n + 1]) * 64 for n in range(3)], "block 2 is corrupt", id="another block"),
    ],
)
def test_wrong_names_fail_that_transfer_only(
    rig: Rig, peer: Peer, sources: list[int], sums: list[bytes], reason: str
) -> None:
    peer.share()
    rig.expect(peer)
    peer.name(0, sources, sums=sums)
    assert reason in fails(rig, peer)


def test_a_block_that_changed_meanwhile_is_not_taken_for_good(rig: Rig, peer: Peer) -> None:
    memory = peer.share()
    rig.expect(peer)
    memory.pages[64] ^= 1
    peer.name(0, [0, 1])
    assert "block 1 is corrupt, or its sender reused it" in fails(rig, peer)


def test_names_without_shared_memory_fail(rig: Rig, peer: Peer) -> None:
    rig.expect(peer)
    peer.name(0, [0])
    assert "this worker cannot read" in fails(rig, peer)


def test_frames_behind_names_fail(rig: Rig, peer: Peer) -> None:
    peer.share()
    rig.expect(peer)
    peer.send(KVBlocks(request_id="a", attempt=0, first_block=0, checksums=(1,), sources=(0,)), b"x" * 64, b"y")
    assert "2 unexpected frames" in fails(rig, peer)


def test_names_that_come_too_late_do_no_harm(rig: Rig, peer: Peer) -> None:
    peer.share()
    rig.expect(peer)
    assert rig.receiver.release("a", 0).received == set()
    peer.name(0, [0, 1])
    rig.sync()
    assert not rig.memory.any() and not rig.events
    assert rig.receiver.num_dropped_frames == 1


def test_memory_of_a_dead_prefill_worker_fails_its_transfers(rig: Rig, peer: Peer) -> None:
    peer.share()
    transfer = rig.expect(peer)
    transfer.memory.close()
    peer.name(0, [0])
    assert "cannot be read" in fails(rig, peer)


def test_an_offer_that_does_not_hold_means_frames(rig: Rig, peer: Peer) -> None:
    peer.share()
    wrong = structs.replace(peer.shared.offer, nonce=b"?" * 16)
    peer.offer = KVOffer.of("shm", wrong)
    assert rig.expect(peer).memory is None
    peer.ship(0, 4)
    peer.done()
    assert isinstance(rig.event(), TransferCompleted)


@pytest.fixture
def slow_write(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """(begun, may go on): of the write of each block. Blocks are known by where they are written."""
    begun, go_on = threading.Event(), threading.Event()

    def view(index: int) -> memoryview:
        begun.set()
        assert go_on.wait(WAIT_S)
        return memoryview(rig.memory[index])

    monkeypatch.setattr(rig.receiver._blocks, "view", view)
    yield begun, go_on
    go_on.set()


def test_the_engine_does_not_wait_while_a_block_is_written(rig: Rig, peer: Peer, slow_write: Any) -> None:
    begun, go_on = slow_write
    rig.expect(peer, range(8), "b")
    transfer = rig.expect(peer, range(8, 12))
    peer.ship(0, 4)
    assert begun.wait(WAIT_S)
    rig.receiver.touch("a", 0, time.monotonic())
    assert rig.receiver.stalled(0.0) == []
    assert rig.receiver.release("b", 0) is not None  # of another transfer
    assert not go_on.is_set()
    go_on.set()
    peer.done()
    assert rig.event() == TransferCompleted(transfer)
    assert received_exactly(rig, peer, range(8, 12))


def test_a_release_waits_for_the_block_that_is_written_and_no_other_follows(
    rig: Rig, peer: Peer, slow_write: Any
) -> None:
    begun, go_on = slow_write
    transfer = rig.expect(peer, range(8, 12))
    peer.ship(0, 4)
    assert begun.wait(WAIT_S)
    with ThreadPoolExecutor(1) as engine:
        released = engine.submit(rig.receiver.release, "a", 0)
        wait(lambda: transfer.released)
        assert not released.done(), "the block is still being written"
        go_on.set()
        assert released.result(WAIT_S) is transfer
    after = rig.memory.copy()
    rig.sync()
    assert (rig.memory == after).all() and not rig.memory[9:].any()
    assert len(transfer.received) <= 1 and rig.events == []


def test_a_block_that_is_never_written_is_not_given_back(
    rig: Rig, peer: Peer, slow_write: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver, "WRITE_S", 0.05)
    begun, _ = slow_write
    rig.expect(peer)
    peer.ship(0, 1)
    assert begun.wait(WAIT_S)
    with pytest.raises(BlockError, match=r"transfer a/0: writing a block took longer than 0\.05 s"):
        rig.receiver.release("a", 0)


def test_a_receiver_that_never_started_can_be_closed() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    KVReceiver(context, KVListener(context, "127.0.0.1", 0), PlainBlocks([]), lambda event: None).close()
    context.term()
