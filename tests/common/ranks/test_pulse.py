"""Signs of life: their absence counts, and only as far as rank 0 was there to see them."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from common.ranks.links import pulse
from common.ranks.links.channel import Channel
from common.ranks.links.pulse import LOOK_S, SignsOfLife, give_pulse


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    first, second = Channel.pair()
    pair = Channel(first, "rank 1"), Channel(second, "rank 0")
    yield pair
    for end in pair:
        end.close()


def test_silence_is_counted_until_the_next_sign(ends: tuple[Channel, Channel]) -> None:
    clock = Clock()
    seen = SignsOfLife(ends[0], clock)
    for expected in (1.0, 2.0, 3.0):
        clock.now += 1.0
        assert seen.silent_s() == expected
    ends[1].try_send(b"x")
    clock.now += 1.0
    assert seen.silent_s() == 0.0
    clock.now += 0.5
    assert seen.silent_s() == 0.5


def test_a_rank_0_that_was_stopped_itself_does_not_take_that_for_silence(ends: tuple[Channel, Channel]) -> None:
    clock = Clock()
    seen = SignsOfLife(ends[0], clock)
    clock.now += 3600.0
    assert seen.silent_s() == LOOK_S
    clock.now += 3600.0
    ends[1].try_send(b"x")
    assert seen.silent_s() == 0.0


def test_a_rank_gives_signs_until_rank_0_is_gone(
    ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulse, "PULSE_S", 0.01)
    giving = threading.Thread(target=give_pulse, args=(ends[1],))
    giving.start()
    for _ in range(3):
        assert ends[0]._has(1, 5.0) and ends[0].drain()  # 1: POLLIN
    ends[0].cut()
    giving.join(5.0)
    assert not giving.is_alive()
