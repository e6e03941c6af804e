"""A reader of the log knows what the prefix cache holds."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.engine.kv.block_log import BlockLog
from common.engine.kv.block_pool import BlockPool
from common.wire.codec import decode, encode
from common.wire.messages import MAX_SHORT_HASHES, BlockEvents, BlockSnapshot

from ....examples import examples


def digest(number: int) -> bytes:
    return number.to_bytes(8, "big") + bytes(8)


def shorts(packed: bytes) -> set[bytes]:
    return {packed[at : at + 8] for at in range(0, len(packed), 8)}


class Follower:
    """What a router makes of a worker's messages."""

    def __init__(self) -> None:
        self.held: set[bytes] = set()
        self.sequence = 0

    def take(self, events: list[BlockEvents]) -> None:
        for event in events:
            assert decode(encode(event)) == event
            assert event.sequence == self.sequence + 1 and not shorts(event.stored) & shorts(event.removed)
            self.sequence = event.sequence
            self.held = (set() if event.cleared else self.held) - shorts(event.removed) | shorts(event.stored)

    def restore(self, pieces: list[BlockSnapshot]) -> None:
        assert [piece.piece for piece in pieces] == list(range(pieces[0].num_pieces))
        self.sequence = pieces[0].sequence
        self.held = set().union(*(shorts(piece.hashes) for piece in pieces))


def test_blocks_enter_with_publish_and_leave_with_eviction() -> None:
    log = BlockLog(epoch=5)
    pool = BlockPool(2, log=log)
    (block,) = pool.allocate(1)
    assert log.take() == [] and log.sequence == 0
    pool.wrote([block], 0, 1)
    pool.publish(block, digest(1))
    assert log.take() == [BlockEvents(epoch=5, sequence=1, stored=digest(1)[:8])]
    pool.release([block])
    assert log.take() == [], "a released block stays cached"
    pool.allocate(2)
    assert log.take() == [BlockEvents(epoch=5, sequence=2, removed=digest(1)[:8])]


def test_a_block_that_is_private_is_not_told() -> None:
    log = BlockLog()
    pool = BlockPool(2, log=log)
    blocks = pool.allocate(2)
    for block in blocks:
        pool.wrote([block], 0, 1)
        pool.publish(block, digest(1))
    log.take()
    pool.release(blocks)
    pool.allocate(1)  # the private one
    assert log.take() == []


def test_of_a_block_that_comes_and_goes_the_last_is_told() -> None:
    log = BlockLog()
    log.stored(digest(1))
    log.removed(digest(1))
    log.stored(digest(2))
    (event,) = log.take()
    assert (event.stored, event.removed) == (digest(2)[:8], digest(1)[:8])


def test_many_changes_are_told_in_several_events() -> None:
    log, follower = BlockLog(), Follower()
    for number in range(2 * MAX_SHORT_HASHES + 1):
        log.stored(digest(number))
    events = log.take()
    follower.take(events)
    assert len(events) == 3 and len(follower.held) == 2 * MAX_SHORT_HASHES + 1
    assert log.sequence == 3


def test_too_many_changes_are_a_gap_that_a_snapshot_closes() -> None:
    log, follower = BlockLog(max_changes=4), Follower()
    for number in range(5):
        log.stored(digest(number))
    assert log.take() == [] and log.sequence == 1, "the number shows that an event is missing"
    log.stored(digest(9))
    follower.restore(log.snapshot())
    follower.take(log.take())
    assert follower.held == {digest(number)[:8] for number in (0, 1, 2, 3, 4, 9)}


def test_a_snapshot_comes_in_pieces() -> None:
    log, follower = BlockLog(), Follower()
    assert [piece.hashes for piece in log.snapshot()] == [b""]
    for number in range(MAX_SHORT_HASHES + 1):
        log.stored(digest(number))
    follower.restore(log.snapshot())
    assert len(log.snapshot()) == 2 and len(follower.held) == MAX_SHORT_HASHES + 1


def test_the_engine_changes_it_while_another_thread_takes() -> None:
    log, follower = BlockLog(), Follower()

    def change() -> None:
        for number in range(20_000):
            (log.stored if number % 3 else log.removed)(digest(number % 50))

    engine = threading.Thread(target=change)
    engine.start()
    while engine.is_alive():
        follower.take(log.take())
    engine.join()
    follower.take(log.take())
    (piece,) = log.snapshot()
    assert follower.held == shorts(piece.hashes)


ACTS = st.one_of(
    st.tuples(st.just("use"), st.lists(st.integers(0, 7), max_size=3)),
    st.tuples(st.sampled_from(["reset", "take", "snapshot"]), st.just([])),
)


@pytest.mark.slow
@settings(derandomize=True, deadline=None, max_examples=examples(150))
@given(st.lists(ACTS, max_size=30), st.integers(2, 20))
def test_a_follower_always_holds_what_the_pool_does(acts: list[tuple[str, list[int]]], max_changes: int) -> None:
    log, follower = BlockLog(max_changes=max_changes), Follower()
    pool = BlockPool(4, log=log)
    for act, numbers in [*acts, ("take", [])]:
        if act == "reset":
            pool.reset_cache()
        elif act == "snapshot":
            follower.restore(log.snapshot())
        elif act == "take":
            follower.take(log.take())
            if follower.sequence != log.sequence:
                follower.restore(log.snapshot())
            assert follower.held == {known[:8] for known in pool._block_of}
        else:
            blocks = pool.allocate(len(numbers))
            for block, number in zip(blocks, numbers, strict=True):
                pool.wrote([block], 0, 1)
                pool.publish(block, digest(number))
            pool.release(blocks)
