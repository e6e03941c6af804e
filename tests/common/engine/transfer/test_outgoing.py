"""The states of an outgoing transfer."""

from __future__ import annotations

import pytest

from common.engine.transfer.sender import OutgoingTransfer, TransferAdvanced
from common.wire.messages import KVDone, KVTarget

DONE = KVDone(request_id="a", attempt=0, first_token=1)


def transfer(num_ready: int = 0, *, granted: int | None = None, done: bool = False) -> OutgoingTransfer:
    state = OutgoingTransfer("a", 0, KVTarget("d", 1, "tcp://x"), range(4), 0.0, 1.0, num_ready=num_ready)
    if granted is not None:
        assert state.grant(granted, 0.5)
    state.done = DONE if done else None
    return state


def test_nothing_ships_without_a_grant() -> None:
    assert not transfer(4, done=True).shippable(9)


@pytest.mark.parametrize(
    ("granted", "num_ready", "limit", "expected"),
    [(0, 4, 9, range(4)), (0, 4, 3, range(3)), (2, 4, 9, range(2, 4)), (2, 1, 9, range(2, 2)), (4, 4, 9, range(4, 4))],
)
def test_ships_what_is_granted_and_computed(granted: int, num_ready: int, limit: int, expected: range) -> None:
    assert transfer(num_ready, granted=granted).shippable(limit) == expected


@pytest.mark.parametrize("first_block", [-1, 5])
def test_a_grant_out_of_range_is_refused(first_block: int) -> None:
    assert not transfer().grant(first_block, 0.0)


def test_a_second_grant_is_refused() -> None:
    assert not transfer(granted=1).grant(0, 0.0)


def test_finishes_once_everything_was_handed_over() -> None:
    state = transfer(4, granted=0, done=True)
    assert not state.can_finish
    state.next_block = 4
    assert state.can_finish
    state.finish()
    assert not state.can_finish


def test_a_full_hit_finishes_at_once() -> None:
    assert transfer(4, granted=4, done=True).can_finish


def test_the_decode_worker_owes_nothing_while_the_prompt_is_computed() -> None:
    assert transfer(0, granted=0).computing
    assert not transfer(0).computing
    assert not transfer(1, granted=0).computing
    assert not transfer(4, granted=4, done=True).computing


# ---------------------------------------------------------------- a sequence that goes on growing


def growing(num_ready: int = 0) -> OutgoingTransfer:
    return OutgoingTransfer("a", 0, KVTarget("d", 1, "tcp://x"), range(3), 0.0, 1.0, num_ready=num_ready, room=6)


def test_a_growing_transfer_announces_its_room_and_ships_what_is_full() -> None:
    state = growing(2)
    assert state.num_announced == 6 and not state.advanced()
    assert not state.grant(7, 0.0)
    assert state.grant(0, 0.0)
    assert state.advanced() == TransferAdvanced("a", 0, caught_up=False)
    assert state.shippable(9) == range(2) and not state.wants_echo


def test_a_growing_transfer_catches_up_when_the_receiver_says_so() -> None:
    state = growing(2)
    state.grant(0, 0.0)
    state.advanced()
    state.next_block = 2
    assert state.wants_echo and not state.advanced()
    state.ask()
    assert not state.wants_echo and not state.advanced()
    state.answer()
    assert state.advanced() == TransferAdvanced("a", 0, caught_up=True)
    assert not state.advanced()


def test_a_growing_transfer_is_drained_when_the_last_of_its_blocks_left() -> None:
    state = growing(2)
    state.grant(0, 0.0)
    state.next_block = 2
    assert not state.drained and not state.can_finish
    state.blocks, state.num_ready, state.done = range(4), 4, DONE
    assert state.shippable(9) == range(2, 4)
    state.next_block = 4
    assert state.can_finish


def test_a_receiver_that_holds_more_than_was_full_gets_nothing_twice() -> None:
    state = growing(2)
    state.grant(3, 0.0)
    state.advanced()
    assert not state.shippable(9) and state.wants_echo
    state.blocks, state.num_ready, state.done = range(3), 3, DONE
    assert state.can_finish
