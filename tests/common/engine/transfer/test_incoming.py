"""The states of an incoming transfer."""

from __future__ import annotations

import pytest

from common.engine.transfer.receiver import IncomingTransfer
from common.wire.messages import KVDone


def transfer(*received: int, first_block: int = 0, done: bool = False) -> IncomingTransfer:
    state = IncomingTransfer("a", 0, b"p", range(4), first_block, 0.0, 0.0, received=set(received))
    state.done = KVDone(request_id="a", attempt=0, first_token=1) if done else None
    return state


def test_complete_needs_every_block_and_the_end() -> None:
    assert transfer(0, 1, 2, 3, done=True).complete
    assert not transfer(0, 1, 3, done=True).complete
    assert not transfer(0, 1, 2, 3).complete


def test_blocks_held_before_are_not_missed() -> None:
    assert transfer(2, 3, first_block=2, done=True).complete
    assert transfer(first_block=4, done=True).complete


@pytest.mark.parametrize(("received", "expected"), [((), 1), ((1, 2), 3), ((1, 3), 2), ((2, 3), 1), ((1, 2, 3), 4)])
def test_the_prefix_ends_at_the_first_gap(received: tuple[int, ...], expected: int) -> None:
    assert transfer(*received, first_block=1).num_prefix_received == expected


@pytest.mark.parametrize(
    ("index", "expected"), [(0, False), (1, False), (2, True), (3, True), (4, False), (2**62, False)]
)
def test_wants_granted_blocks_once(index: int, expected: bool) -> None:
    assert transfer(1, first_block=1).wants(index) is expected


def test_the_end_of_a_hand_over_says_how_many_blocks_there_are() -> None:
    state = transfer(0, 1)
    state.done = KVDone(request_id="a", attempt=0, first_token=1, num_blocks=3)
    assert (state.num_blocks, state.num_missing, state.complete) == (3, 1, False)
    state.received.add(2)
    assert state.complete


def test_bytes_that_came_after_a_moment_are_told() -> None:
    state = transfer(0, 1, 2)
    state.arrivals += [(1.0, 100), (2.0, 50), (3.0, 7)]
    assert [state.bytes_since(at) for at in (0.0, 1.0, 2.5, 3.0)] == [157, 57, 7, 0]
