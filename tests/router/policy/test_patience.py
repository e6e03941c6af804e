"""When a queue is a burst, and when it is more than can be served."""

import pytest

from router.policy.wait_limit import NUM_REFUSED, NUM_WINDOWS, SHARE_REFUSED, WINDOW_S, WaitLimit


def window(patience, now, *, taken=0, refused=0):
    """A window's requests, and its end."""
    for _ in range(taken):
        patience.count(refused=False)
    for _ in range(refused):
        patience.count(refused=True)
    return patience.tick(now)


def patience_after(*windows, longest_s=30.0, reduced_s=0.5):
    """Windows are (taken, refused)."""
    patience = WaitLimit(longest_s, reduced_s)
    patience.tick(0.0)
    for turn, (taken, refused) in enumerate(windows):
        window(patience, (turn + 1) * WINDOW_S, taken=taken, refused=refused)
    return patience


def test_a_burst_and_what_its_clients_send_again_is_no_overload():
    assert not patience_after((30, 70), (0, 70)).is_reduced
    assert not patience_after((30, 70), (0, 70), (10, 0), (10, 70), (10, 70)).is_reduced


def test_refusals_that_go_on_are_an_overload():
    patience = patience_after(*[(10, 90)] * NUM_WINDOWS)
    assert patience.is_reduced
    assert patience.limit_s(turn_s=0.01) == 0.5


@pytest.mark.parametrize("refused", [NUM_REFUSED - 1, 2])
def test_a_few_refusals_are_none(refused):
    assert not patience_after(*[(0, refused)] * 9).is_reduced


def test_nor_is_a_small_share():
    assert not patience_after(*[(1000, int(1000 * SHARE_REFUSED))] * 9).is_reduced


def test_one_good_window_ends_it():
    patience = patience_after(*[(10, 90)] * NUM_WINDOWS)
    assert window(patience, 100.0, taken=10, refused=2), "it changed"
    assert patience.limit_s(turn_s=0.01) == 30.0


def test_it_changes_only_when_a_window_is_over():
    patience = patience_after(*[(10, 90)] * NUM_WINDOWS)
    assert not window(patience, NUM_WINDOWS * WINDOW_S + 0.9 * WINDOW_S, taken=10)
    assert patience.is_reduced


def test_a_few_requests_may_always_wait_but_never_longer_than_in_a_burst():
    patience = patience_after(*[(10, 90)] * NUM_WINDOWS)
    assert patience.limit_s(turn_s=1.0) == 3.0
    assert patience.limit_s(turn_s=100.0) == 30.0


def test_it_can_be_turned_off():
    assert not patience_after(*[(0, 90)] * 9, reduced_s=30.0).is_reduced
