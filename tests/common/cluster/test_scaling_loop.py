"""The signals in a closed loop: an autoscaler that reads them, pods that start late, requests that wait for them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest

from common.cluster.scaling import DecodeLoad, backlog_s, pressure, unblocked_share
from common.latency.step_model import StepModel, StepShape

MODEL = StepModel(fixed_s=0.02, row_s=0.001, num_steps=99)
"""30 rows of a worker meet a goal of 50 ms."""
TICK_S, POLL_S, START_S, SETTLE_S = 1.0, 15.0, 60.0, 300.0
TARGET, NUM_TOKENS, MAX_PODS = 0.9, 400, 32


@dataclass
class DecodeLoop:
    """Requests share the ready pods evenly. The autoscaler wants ceil(sum / target), and shrinks to the most lately."""

    goal_s: float
    num_ready: int = 1
    rows: float = 0.0
    most_rows: float = 0.0
    starting: list[float] = field(default_factory=list)
    wishes: list[tuple[float, int]] = field(default_factory=list)
    history: list[int] = field(default_factory=list)

    @property
    def token_s(self) -> float:
        return MODEL.seconds(StepShape.of_rows(1, 0)) + MODEL.row_s * max(0.0, self.rows / self.num_ready - 1)

    def run(self, seconds: float, rate: float) -> None:
        for tick in range(int(seconds)):
            now = len(self.history) * TICK_S
            self.num_ready += sum(at <= now for at in self.starting)
            self.starting = [at for at in self.starting if at > now]
            self.rows += rate * TICK_S - self.rows * TICK_S / (NUM_TOKENS * self.token_s)
            self.most_rows = max(self.most_rows, self.rows)
            if tick % POLL_S == 0:
                self.poll(now)
            self.history.append(self.num_ready + len(self.starting))

    def poll(self, now: float) -> None:
        each = round(self.rows / self.num_ready)
        work = DecodeLoad(0.1, each, 0, each, 0, MODEL)
        wish = min(MAX_PODS, max(1, math.ceil(self.num_ready * pressure(work, self.goal_s) / TARGET)))
        self.wishes.append((now, wish))
        lasting = max(wish for at, wish in self.wishes if at > now - SETTLE_S)
        present = self.num_ready + len(self.starting)
        if wish > present:
            self.starting += [now + START_S] * (wish - present)
        elif lasting < self.num_ready and not self.starting:
            self.num_ready = lasting


def test_a_pool_that_starts_slowly_grows_once_by_what_is_missing() -> None:
    """80 rows at 50 ms: three pods of 30. While they start, four polls see the same full pod and what piles up."""
    loop = DecodeLoop(goal_s=0.05)
    loop.run(1200, rate=5.0)
    assert loop.history[-1] in (3, 4) and loop.token_s <= 0.05
    assert max(loop.history) <= math.ceil((loop.most_rows + 1) / 30 / TARGET), "what piled up, not a product of it"
    signs = [b > a for a, b in zip(loop.history, loop.history[1:], strict=False) if a != b]
    assert sum(a != b for a, b in zip(signs, signs[1:], strict=False)) <= 1, "up, then down, and no more"


def test_a_goal_near_the_time_of_a_lone_row_does_not_pin_an_idle_pool() -> None:
    """A lone row takes 21 of 25 ms, 0.84 of the goal, and the target is 0.9."""
    loop = DecodeLoop(goal_s=0.025)
    loop.run(600, rate=0.05)
    assert max(loop.history) == 1


def test_a_goal_out_of_reach_does_not_pin_the_pool_at_its_maximum() -> None:
    loop = DecodeLoop(goal_s=0.01)
    loop.run(900, rate=1.0)
    assert 1 <= loop.history[-1] <= 3


@pytest.mark.parametrize(("num_decode_rows", "grows"), [(8, "decode"), (400, "prefill")])
def test_the_pool_that_lacks_grows(num_decode_rows: int, grows: str) -> None:
    """Ten prompts a second come for five minutes. Either decode takes few of them, or prefill computes few."""
    waiting, held, running, decoding = 0.0, 0.0, 0.0, 0.0
    prompt_s, room = (0.02, 40) if grows == "decode" else (0.2, 40)
    for _ in range(300):
        waiting += 10
        running = min(waiting, 1 / prompt_s, room - held)
        waiting, held = waiting - running, held + running
        decoding -= decoding / 20
        taken = min(held, num_decode_rows - decoding)
        decoding, held = decoding + taken, held - taken
    usage = (held + running) / room
    share = unblocked_share(min(1.0, usage), int(running), int(held))
    prefill = math.ceil(backlog_s(waiting * 100 * share, 100 / prompt_s) / 20)
    work = DecodeLoad(decoding / num_decode_rows, int(decoding), int(held), int(decoding), 0, StepModel())
    decode = math.ceil(pressure(work, 0.0) / TARGET)
    assert (decode > 2, prefill > 2) == (grows == "decode", grows == "prefill")
