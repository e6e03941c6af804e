"""The states of an outgoing transfer."""

from __future__ import annotations

import pytest

from diptych.common.messages import KVDone, KVTarget
from diptych.prefill_worker.transfer import OutgoingTransfer

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
    state.done_sent = True
    assert not state.can_finish


def test_a_full_hit_finishes_at_once() -> None:
    assert transfer(4, granted=4, done=True).can_finish


def test_the_decode_worker_owes_nothing_while_the_prompt_is_computed() -> None:
    assert transfer(0, granted=0).computing
    assert not transfer(0).computing
    assert not transfer(1, granted=0).computing
    assert not transfer(4, granted=4, done=True).computing
