"""The sender against a decode worker that the test plays, over real sockets."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import xxhash

from common.blocks.window import HOLE
from common.engine.kv.shared_memory import KVMemory
from common.engine.transfer import sender as sender_module
from common.engine.transfer.frames import SEND_HWM
from common.engine.transfer.sender import TransferState
from common.wire.messages import KVAck, KVBlocks, KVDone, KVFailed, KVOffer, KVOpen, KVTarget, KVWait

Rig = Any  # SenderRig of conftest, which test modules cannot import


@pytest.fixture
def rig(make_sender_rig: Callable[..., Rig]) -> Rig:
    return make_sender_rig()


def test_announces_who_it_is_and_whom_it_means(rig: Rig) -> None:
    rig.open(blocks=3)
    opened = rig.read_open()
    assert (opened.worker_id, opened.epoch, opened.decode_epoch) == ("p", 5, 7)
    assert (opened.fingerprint, opened.num_blocks) == ("layout", 3) and opened.sent_at > 0


def test_ships_after_the_grant_and_says_done_last(rig: Rig) -> None:
    rig.open(num_ready=1)
    rig.finish()
    rig.read_open()
    rig.grant()
    header, frames = rig.read()
    assert isinstance(header, KVBlocks) and header.first_block == 0
    assert frames == [bytes(block) for block in rig.memory[:4]]
    assert header.checksums == tuple(xxhash.xxh3_64_intdigest(frame) for frame in frames)
    done, _ = rig.read()
    assert isinstance(done, KVDone) and done.first_token == 3


def test_ships_each_chunk_when_it_is_computed(rig: Rig) -> None:
    rig.open()
    rig.read_open()
    rig.grant()
    for num_ready in (2, 3):
        rig.sender.progress("a", 0, num_ready)
        header, frames = rig.read()
        assert header.first_block + len(frames) == num_ready
    rig.finish()
    assert [type(rig.read()[0]) for _ in range(2)] == [KVBlocks, KVDone]


def test_only_missing_blocks_are_shipped(rig: Rig) -> None:
    rig.open(num_ready=4)
    rig.finish()
    rig.read_open()
    rig.grant(first_block=3)
    header, frames = rig.read()
    assert (header.first_block, len(frames)) == (3, 1)


def test_a_full_hit_ships_nothing_and_completes(rig: Rig) -> None:
    rig.open()
    rig.read_open()
    rig.grant(first_block=4)
    rig.finish()
    assert isinstance(rig.read()[0], KVDone)
    rig.reply(KVAck(request_id="a", attempt=0))
    rig.wait(lambda: rig.ended)
    assert (rig.ended[0].reason, rig.ended[0].num_shipped, rig.ended[0].num_skipped) == ("", 0, 4)


def test_the_acknowledgement_ends_it_once(rig: Rig) -> None:
    rig.open()
    rig.finish()
    rig.read_open()
    rig.grant(first_block=1)
    rig.read()
    rig.read()
    for _ in range(2):
        rig.reply(KVAck(request_id="a", attempt=0))
    rig.grant("unknown")
    rig.read_failed()
    assert [(e.request_id, e.reason, e.num_shipped, e.num_skipped) for e in rig.ended] == [("a", "", 3, 1)]


def test_an_early_acknowledgement_ends_it_too(rig: Rig) -> None:
    rig.open()
    rig.read_open()
    rig.reply(KVAck(request_id="a", attempt=0))
    rig.wait(lambda: rig.ended)
    assert rig.ended[0].reason == ""


def test_a_refusal_ends_it_with_its_reason(rig: Rig) -> None:
    rig.open()
    rig.read_open()
    rig.reply(KVFailed(request_id="a", attempt=0, reason="boot epoch 9"))
    rig.wait(lambda: rig.ended)
    assert "boot epoch 9" in rig.ended[0].reason


@pytest.mark.slow
def test_no_grant_ends_with_the_lease(make_sender_rig: Callable[..., Rig]) -> None:
    rig = make_sender_rig(lease_s=0.5)  # what was never announced is not taken back either: it must have left by then
    rig.open(num_ready=4)
    assert rig.read_failed().reason == "lease expired"
    rig.wait(lambda: rig.ended)
    assert "sent nothing for 0.5 s" in rig.ended[0].reason


@pytest.mark.slow
def test_no_acknowledgement_ends_with_the_lease(make_sender_rig: Callable[..., Rig]) -> None:
    rig = make_sender_rig(lease_s=1.0)
    rig.open()
    rig.finish()
    rig.read_open()
    rig.grant()
    assert [type(rig.read()[0]) for _ in range(2)] == [KVBlocks, KVDone]
    assert rig.read_failed().reason == "lease expired"


def test_an_unreachable_decode_worker_ends_with_the_lease(make_sender_rig: Callable[..., Rig]) -> None:
    rig = make_sender_rig(lease_s=0.05)
    for number in range(2 * SEND_HWM):
        rig.sender.open(f"r{number}", 0, KVTarget("d", 7, "tcp://127.0.0.1:1"), [0], 1)
    rig.wait(lambda: len(rig.ended) == 2 * SEND_HWM)


def test_waiting_renews_the_lease(rig: Rig) -> None:
    rig.open()
    rig.read_open()
    transfer = rig.sender._transfers[("a", 0)]
    before = transfer.lease_until
    rig.reply(KVWait(request_id="a", attempt=0))
    rig.wait(lambda: transfer.lease_until > before)


@pytest.mark.slow
def test_slow_computing_costs_no_lease_and_says_so(
    make_sender_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender_module, "ANNOUNCE_S", 0.15)
    rig = make_sender_rig(lease_s=0.8)  # the grant comes in time on a busy machine too
    rig.open()
    rig.read_open()
    rig.grant()
    for _ in range(6):  # longer than the lease
        rig.read_open()
    assert not rig.ended
    rig.finish()
    while not isinstance(rig.read()[0], KVDone):
        pass


def test_a_cut_connection_announces_its_transfers_again(rig: Rig) -> None:
    """Answers to the name that the sender had before the cut are lost, although ZeroMQ itself connects again."""
    rig.open("opened")
    rig.open("sent")
    rig.finish("sent")
    while (message := rig.read()[0]).request_id != "sent":
        pass
    rig.grant("sent")
    while not isinstance(message, KVDone):
        message, _ = rig.read()
    before = rig.peer
    rig.cut()
    assert {rig.read_open().request_id for _ in range(2)} == {"opened", "sent"} and rig.peer != before
    rig.ack("sent")
    rig.wait(lambda: [end.request_id for end in rig.ended] == ["sent"])


def test_a_cut_of_any_stream_announces_the_transfers_under_a_new_name(make_sender_rig: Callable[..., Rig]) -> None:
    """A decode worker takes the name of the first stream for the whole connection, and blocks of any may be lost."""
    rig = make_sender_rig(num_streams=2)
    rig.open(num_ready=1)
    rig.read_open()
    first = rig.peer
    rig.grant()
    num_ready = 1
    while rig.read() and rig.peer == first:  # until a block comes through the other stream
        num_ready += 1
        rig.sender.progress("a", 0, num_ready)
    second = rig.peer
    rig.cut()
    rig.read_open()
    assert rig.peer not in (first, second)


def test_cancelling_tells_the_decode_worker_and_nobody_else(rig: Rig) -> None:
    rig.open()
    rig.read_open()
    rig.sender.cancel("a", 0, "aborted")
    assert rig.read_failed().reason == "aborted"
    assert not rig.ended


@pytest.mark.parametrize("state", [TransferState.OPENED, TransferState.GRANTED])
def test_cancelling_while_the_announcement_is_repeated_tells_the_decode_worker(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, state: TransferState
) -> None:
    """After a reconnection, it takes a failure only from a sender that it knows, by an announcement."""
    rig.open()
    rig.read_open()
    if state is TransferState.GRANTED:
        rig.grant()
    transfer = rig.sender._transfers[("a", 0)]
    rig.wait(lambda: transfer.state is state and not rig.sender._unopened)
    send = sender_module.try_send
    monkeypatch.setattr(sender_module, "try_send", lambda *message: transfer.revoked and send(*message))
    rig.cut()
    rig.wait(lambda: rig.sender._unopened)
    rig.sender.cancel("a", 0, "aborted")
    before = rig.peer
    rig.read_open()
    assert rig.read_failed().reason == "aborted" and rig.peer != before


def test_cancelling_before_the_announcement_is_silent(rig: Rig) -> None:
    rig.sender.cancel("never", 0, "aborted")
    rig.open("b")
    assert rig.read_open().request_id == "b"


def test_a_grant_for_what_was_cancelled_is_answered_with_failure(rig: Rig) -> None:
    rig.open(num_ready=4)
    rig.read_open()
    rig.sender.cancel("a", 0, "aborted")
    rig.read_failed()
    rig.grant()
    assert "no longer has this transfer" in rig.read_failed().reason
    assert rig.sender.num_bytes == 0


def test_no_block_is_read_for_the_wire_after_cancel_returned(rig: Rig) -> None:
    reading, cancelled = threading.Event(), threading.Event()

    def on_view(index: int) -> None:
        reading.set()
        assert cancelled.wait(30)

    rig.on_view = on_view
    rig.open(num_ready=4)
    rig.read_open()
    rig.grant()
    assert reading.wait(30)
    rig.sender.cancel("a", 0, "its blocks go to another prompt")
    rig.memory[:] = 0
    cancelled.set()
    assert isinstance(rig.read()[0], KVFailed)
    assert rig.sender.num_bytes == 0


def test_withdrawn_blocks_are_not_read_and_others_take_their_place(rig: Rig) -> None:
    read: list[int] = []
    rig.on_view = read.append
    rig.open(num_ready=1)
    rig.read_open()
    rig.grant()
    rig.read()
    rig.sender.withdraw("a", 0)
    rig.sender.progress("a", 0, 0, blocks=[8, -1, -1, -1])  # preempted, and computed again in other blocks
    rig.sender.progress("a", 0, 3, blocks=[8, 9, 10, -1])
    header, frames = rig.read()
    assert header.first_block == 1 and frames == [bytes(rig.memory[9]), bytes(rig.memory[10])]
    rig.sender.progress("a", 0, 4, KVDone(request_id="a", attempt=0, first_token=3), blocks=[8, 9, 10, 11])
    assert rig.read()[0].first_block == 3 and isinstance(rig.read()[0], KVDone)
    assert read == [0, 9, 10, 11]


def test_progress_before_a_withdrawal_counts_no_longer(rig: Rig) -> None:
    read: list[int] = []
    rig.on_view = read.append
    rig.open()
    rig.read_open()
    rig.sender.progress("a", 0, 4)
    rig.sender.withdraw("a", 0)
    rig.grant()
    rig.sender.progress("a", 0, 4, KVDone(request_id="a", attempt=0, first_token=3), blocks=[4, 5, 6, 7])
    header, frames = rig.read()
    assert header.first_block == 0 and frames == [bytes(block) for block in rig.memory[4:8]] and read == [4, 5, 6, 7]


def test_a_cancelled_request_may_come_again_under_the_same_attempt(rig: Rig) -> None:
    rig.open(num_ready=4)
    rig.read_open()
    rig.sender.cancel("a", 0, "aborted")
    rig.open(num_ready=4)
    rig.read_failed()
    rig.read_open()
    rig.finish()
    rig.grant()
    assert [type(rig.read()[0]) for _ in range(2)] == [KVBlocks, KVDone]


def test_senseless_grants_are_dropped(rig: Rig) -> None:
    rig.open(num_ready=4)
    rig.read_open()
    rig.grant(first_block=5)
    rig.grant(first_block=2)
    rig.grant(first_block=0)
    assert rig.read()[0].first_block == 2
    rig.wait(lambda: rig.sender.num_dropped_frames == 2)


def test_blocks_out_of_the_window_are_never_granted_nor_read(rig: Rig) -> None:
    """Holes stand for them, and for blocks that come later: the table that has them comes with the progress."""
    rig.sender.open("a", 0, rig.target, [HOLE, HOLE, 2, HOLE], 2, first_block=2)
    assert rig.read_open().first_block == 2
    rig.grant(first_block=1)
    rig.wait(lambda: rig.sender.num_dropped_frames == 1)
    rig.grant(first_block=2)
    rig.sender.progress("a", 0, 3, blocks=[HOLE, HOLE, 2, HOLE])
    header, frames = rig.read()
    assert (header.first_block, frames) == (2, [bytes(rig.memory[2])])
    done = KVDone(request_id="a", attempt=0, first_token=3)
    rig.sender.progress("a", 0, 4, done, [HOLE, HOLE, 2, 5])
    header, frames = rig.read()
    assert (header.first_block, frames) == (3, [bytes(rig.memory[5])])
    assert isinstance(rig.read()[0], KVDone)
    rig.ack()
    rig.wait(lambda: rig.ended)
    assert (rig.ended[-1].num_shipped, rig.ended[-1].num_skipped) == (2, 0)


@pytest.mark.parametrize("garbage", [[b""], [b"\xc1"], [b"\x91" * 5000], [b"", b"x"]])
def test_survives_garbage(rig: Rig, garbage: list[bytes]) -> None:
    rig.open()
    rig.read_open()
    rig.router.send_multipart([rig.peer, *garbage])
    rig.reply(KVOpen(request_id="a", attempt=0, worker_id="p", epoch=1, decode_epoch=1, fingerprint="f", num_blocks=1))
    rig.wait(lambda: rig.sender.num_dropped_frames == 2)
    rig.finish()
    rig.grant()
    assert isinstance(rig.read()[0], KVBlocks)


OFFER = KVMemory(pid=1, fd=2, num_bytes=1024, nonce=b"n" * 16)


def test_who_shares_memory_gets_names_instead_of_frames(make_sender_rig: Callable[..., Rig]) -> None:
    rig = make_sender_rig(memory=OFFER)
    rig.sender.open("a", 0, rig.target, [9, 3, 5], 3)
    assert rig.read_open().offer == KVOffer.of("shm", OFFER)
    rig.finish(blocks=3)
    rig.grant(first_block=1, shared=True)
    header, frames = rig.read()
    assert (header.first_block, header.sources, frames) == (1, (3, 5), [])
    assert header.checksums == tuple(xxhash.xxh3_64_intdigest(rig.memory[block]) for block in (3, 5))
    assert isinstance(rig.read()[0], KVDone)
    rig.reply(KVAck(request_id="a", attempt=0))
    rig.wait(lambda: rig.ended)
    assert rig.ended[0].transport == "shm" and rig.sender.num_bytes == 2 * 64


def test_who_cannot_share_gets_frames(make_sender_rig: Callable[..., Rig]) -> None:
    rig = make_sender_rig(memory=OFFER)
    rig.open(num_ready=4)
    rig.read_open()
    rig.grant()
    header, frames = rig.read()
    assert not header.sources and len(frames) == 4


def test_who_cannot_share_gets_nothing_where_that_is_required(make_sender_rig: Callable[..., Rig]) -> None:
    rig = make_sender_rig(memory=OFFER, require_shared=True)
    rig.open(num_ready=4)
    rig.read_open()
    rig.grant()
    assert "--kv-transport is shm" in rig.read_failed().reason
    rig.wait(lambda: rig.ended)
    assert "cannot read this worker's memory" in rig.ended[0].reason and rig.sender.num_bytes == 0


def test_a_grant_for_memory_that_was_not_offered_is_dropped(rig: Rig) -> None:
    rig.open(num_ready=4)
    assert rig.read_open().offer is None
    rig.grant(shared=True)
    rig.grant()
    assert len(rig.read()[1]) == 4
    rig.wait(lambda: rig.sender.num_dropped_frames == 1)


def test_many_transfers_share_a_connection(make_sender_rig: Callable[..., Rig]) -> None:
    rig = make_sender_rig(num_streams=3)
    names = {f"r{number}" for number in range(3 * SEND_HWM)}
    for name in names:
        rig.open(name)
        rig.finish(name)
    seen: list[str] = []
    while len(seen) < len(names):
        message, _ = rig.read()
        if isinstance(message, KVOpen):
            rig.grant(message.request_id)
        elif isinstance(message, KVDone):
            seen.append(message.request_id)
    assert set(seen) == names


@pytest.mark.slow
def test_a_slow_reader_bounds_what_is_sent(make_sender_rig: Callable[..., Rig]) -> None:
    num_blocks, size = 96, 2**20
    rig = make_sender_rig(num_blocks=num_blocks, block_bytes=size)
    rig.open(blocks=num_blocks, num_ready=num_blocks)
    rig.read_open()
    rig.grant()
    blocked = rig.sender._poller
    rig.wait(lambda: any(flags & 2 for _, flags in blocked.sockets))  # the thread waits for room, not for us
    assert rig.sender.num_bytes < num_blocks * size
    received = 0
    while received < num_blocks:
        received += len(rig.read()[1])
    assert rig.sender.num_bytes == num_blocks * size


def test_idle_connections_are_closed(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender_module, "IDLE_CONNECTION_S", 0.0)
    rig.open()
    rig.read_open()
    rig.sender.cancel("a", 0, "aborted")
    rig.wait(lambda: not rig.sender._connections)
    rig.open("b")
    while rig.read()[0].request_id != "b":
        pass
