from __future__ import annotations

from common.observe.averages import Ewma, SlidingWindow


def test_the_first_observation_is_taken_whole() -> None:
    average = Ewma(0.1)
    assert average.value == 0.0
    average.observe(8.0)
    assert average.value == 8.0


def test_each_observation_moves_it_by_a_share_of_the_difference() -> None:
    average = Ewma(0.25, start=0.0)
    average.observe(8.0)
    average.observe(10.0)
    assert average.value == 4.0


def test_slots_expire_one_by_one() -> None:
    window = SlidingWindow[list[str]](60.0, 6, list)
    for now, what in ((1.0, "a"), (9.0, "b"), (10.0, "c"), (55.0, "d")):
        window.current(now).append(what)
    assert window.recent(59.0) == [["a", "b"], ["c"], ["d"]]
    assert window.recent(60.0) == [["c"], ["d"]]
    assert window.recent(200.0) == []


def test_an_observation_that_comes_late_is_counted_in_the_newest_slot() -> None:
    window = SlidingWindow[list[str]](60.0, 6, list)
    window.current(30.0).append("new")
    window.current(29.0).append("late")
    assert window.recent(30.0) == [["new", "late"]]
