"""Signs of life: their absence counts, and only as far as rank 0 was there to see them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from common.engine.ranks import liveness
from common.engine.ranks.channel import Channel
from common.engine.ranks.liveness import HEARTBEAT, LOOK_S, HeartbeatMonitor, send_heartbeats
from common.engine.ranks.processes import OtherRank, RankProcesses
from common.errors import RankLost


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
    seen = HeartbeatMonitor(ends[0], clock)
    for expected in (0.0, 1.0, 2.0, 3.0):  # nothing before the first look
        clock.now += 1.0
        assert seen.silent_s() == expected
    ends[1].try_send(b"x")
    clock.now += 1.0
    assert seen.silent_s() == 0.0
    clock.now += 0.5
    assert seen.silent_s() == 0.5


def test_a_rank_0_that_was_stopped_itself_does_not_take_that_for_silence(ends: tuple[Channel, Channel]) -> None:
    clock = Clock()
    seen = HeartbeatMonitor(ends[0], clock)
    assert seen.silent_s() == 0.0
    clock.now += 3600.0
    assert seen.silent_s() == LOOK_S
    clock.now += 3600.0
    ends[1].try_send(b"x")
    assert seen.silent_s() == 0.0


def test_a_rank_gives_signs_until_rank_0_is_gone(
    ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "HEARTBEAT_S", 0.01)
    giving = threading.Thread(target=send_heartbeats, args=(ends[1],))
    giving.start()
    for _ in range(3):
        assert ends[0]._has(1, 5.0) and ends[0].drain()  # 1: POLLIN
    ends[0].cut()
    giving.join(5.0)
    assert not giving.is_alive()


class ThreeRanks:
    """Rank 0's side of two others that are not there; `theirs` are the ends of those."""

    def __init__(self) -> None:
        self.clock, self.processes, self.theirs = Clock(), RankProcesses(3), list[Channel]()
        for rank in (1, 2):
            ours, theirs = Channel.pair()
            steps = Channel(ours, f"rank {rank}")
            self.theirs.append(Channel(theirs, "rank 0"))
            child: Any = SimpleNamespace(alive=True, wait=lambda deadline: None)
            monitor = HeartbeatMonitor(steps, self.clock)
            self.processes._ranks.append(OtherRank(steps.peer, steps, steps, monitor, child))

    def look(self, seconds: float) -> str:
        self.clock.now += seconds
        return self.processes.failure


@pytest.fixture
def three() -> Iterator[ThreeRanks]:
    ranks = ThreeRanks()
    yield ranks
    ranks.processes.close()
    for end in ranks.theirs:
        end.close()


def test_the_rank_that_is_silent_is_named_among_others(three: ThreeRanks) -> None:
    for _ in range(60):
        assert three.look(1.0) == ""
        three.theirs[1].try_send(HEARTBEAT)
    assert three.look(1.0) == "rank 1 has sent no heartbeat for 60 s: its process is stopped or the host overloaded"


def test_a_rank_whose_sum_fails_first_does_not_hide_the_one_it_waited_for(three: ThreeRanks) -> None:
    for _ in range(31):
        assert three.look(1.0) == ""
        three.theirs[1].try_send(HEARTBEAT)
    named = "rank 1 has sent no heartbeat for 30 s"
    with pytest.raises(RankLost, match=f"a collective failed; {named}"), three.processes.in_step():
        raise RankLost("a collective failed")
    three.theirs[1].close()
    assert three.processes.failure.startswith(f"rank 2 is gone; {named}")
