"""Fair shares against ones computed by hand, and flows in virtual time."""

from __future__ import annotations

import pytest

from benchmarks.simulator.world.clock import Clock
from benchmarks.simulator.world.network import Flow, Link, Network, fair_rates


def flow(number: int, sender: Link, receiver: Link) -> Flow:
    return Flow(number, (sender, receiver), lambda: None)


def test_rates_are_max_min_fair() -> None:
    """Links of 10, 4 and 9: two flows share the 4; the one beside them gets what they leave of the 10."""
    a, b, c, d = Link("a", 10.0), Link("b", 100.0), Link("c", 4.0), Link("d", 9.0)
    first, second, third, fourth = flow(1, a, c), flow(2, b, c), flow(3, a, d), flow(4, b, d)
    rates = fair_rates([first, second, third, fourth])
    # c is tightest: 2 each. Then d: 9 / 2 each, and a has 10 - 2 - 4.5 to spare.
    assert rates == {first: 2.0, second: 2.0, third: 4.5, fourth: 4.5}
    assert fair_rates([first, third]) == {first: 4.0, third: 6.0}


def test_a_flow_gets_the_whole_link_once_it_is_alone() -> None:
    clock, ended = Clock(), []
    network = Network(clock)
    source, one, other = Link("s", 10.0), Link("x", 10.0), Link("y", 10.0)
    short = network.open(source, one, lambda: ended.append(("short", clock.now)))
    long = network.open(source, other, lambda: ended.append(("long", clock.now)))
    network.add(short, 20.0)
    network.add(long, 60.0)
    while clock.step():
        pass
    # 5 each for 4 s; then 40 are left of the long one, at 10 a second.
    assert ended == [("short", pytest.approx(4.0)), ("long", pytest.approx(8.0))]
    assert source.num_bytes == pytest.approx(80.0)
    assert (one.num_bytes, other.num_bytes) == (pytest.approx(20.0), pytest.approx(60.0))


def test_flows_that_share_no_link_do_not_matter_to_each_other() -> None:
    clock, ended = Clock(), []
    network = Network(clock)
    for number in range(3):
        link = network.open(Link("s", 10.0), Link("r", 5.0), lambda number=number: ended.append((number, clock.now)))
        network.add(link, 10.0 * (number + 1))
    while clock.step():
        pass
    assert ended == [(0, pytest.approx(2.0)), (1, pytest.approx(4.0)), (2, pytest.approx(6.0))]


def test_bytes_that_are_added_wait_behind_others_and_those_of_an_ended_flow_are_dropped() -> None:
    clock, ended = Clock(), []
    network = Network(clock)
    one = network.open(Link("s", 10.0), Link("r", 10.0), lambda: ended.append(clock.now))
    network.add(one, 10.0)
    clock.at(0.5, lambda: network.add(one, 10.0))
    clock.at(3.0, lambda: network.add(one, 50.0))
    clock.at(4.0, lambda: network.close(one))
    while clock.step():
        pass
    assert ended == [pytest.approx(2.0)]
    assert one.num_crossed == pytest.approx(30.0)
    assert network.num_bytes_dropped == pytest.approx(40.0)
    assert network.num_bytes_added == pytest.approx(network.num_bytes_crossed + network.num_bytes_dropped)


def test_flows_that_meet_at_one_end_share_from_then_on() -> None:
    """The second flow finds the receiver taken; the first had both of its links for itself until then."""
    clock, ended = Clock(), []
    network = Network(clock)
    one, other, target = Link("x", 10.0), Link("y", 4.0), Link("t", 8.0)
    first = network.open(one, target, lambda: ended.append(("first", clock.now)))
    second = network.open(other, target, lambda: ended.append(("second", clock.now)))
    network.add(first, 24.0)
    clock.at(2.0, lambda: network.add(second, 8.0))
    while clock.step():
        pass
    # 8 a second for 2 s; then 4 each: both have 8 left, and end together.
    assert ended == [("first", pytest.approx(4.0)), ("second", pytest.approx(4.0))]
    assert network.num_bytes_crossed == pytest.approx(32.0)
