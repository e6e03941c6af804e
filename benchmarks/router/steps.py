"""When each stand-in makes its next step, and which of its streams get a token in it."""

from __future__ import annotations

import math
from enum import StrEnum

from benchmarks.router.tally import TOKENS, Tally

LOOK_S = 0.0005
"""Between two looks at what clients have read."""
ALL = slice(None)
"""Every stream of an engine."""


class Pace(StrEnum):
    """HOLD: no step. CLOCK: a step of each engine every `step_s`. READ: as fast as clients read, half a round ahead.

    ONCE: each answer is complete with its first message.
    """

    HOLD = "hold"
    CLOCK = "clock"
    READ = "read"
    ONCE = "once"


class Steps:
    """The steps of `num_engines` engines, which take turns. `part`: the streams of the step that was due last.

    With `most`, a step has so many of them, and `step_s` is the time in which each stream has one: so do many small
    engines.
    """

    def __init__(self, num_engines: int, tally: Tally) -> None:
        self._num, self._tally = num_engines, tally
        self.pace, self._step_s, self._most, self.part = Pace.HOLD, math.inf, 0, ALL
        self._turn, self._next_at = 0, math.inf
        self.num_emitted = 0

    def set(self, pace: Pace, step_s: float, now: float, most: int = 0) -> None:
        """From `now` on."""
        self.pace, self._step_s, self._next_at, self._most = pace, step_s, now, most

    def due(self, now: float, num_running: int) -> int | None:
        """The engine whose step is due; None: none is. It counts as made."""
        if not num_running or self.pace in (Pace.HOLD, Pace.ONCE):
            return None
        if self.pace is Pace.READ and 2 * (self.num_emitted - self._tally.total(TOKENS)) > num_running:
            return None
        if self.pace is Pace.CLOCK:
            if now < self._next_at:
                return None
            self._next_at += self._step_s / (self._num * self._num_parts(num_running))
        turns = self._num * self._num_parts(num_running)
        turn, self._turn = self._turn % turns, (self._turn + 1) % turns
        self.part = slice(turn // self._num, None, turns // self._num)
        return turn % self._num

    def _num_parts(self, num_running: int) -> int:
        return math.ceil(num_running / (self._num * self._most)) if self._most else 1

    def wait_s(self, now: float, num_running: int, most_s: float) -> float:
        """How long to wait until the next look."""
        if not num_running or self.pace in (Pace.HOLD, Pace.ONCE):
            return most_s
        return LOOK_S if self.pace is Pace.READ else min(most_s, max(0.0, self._next_at - now))
