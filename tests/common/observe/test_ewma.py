from __future__ import annotations

from common.observe.averages import Ewma


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
