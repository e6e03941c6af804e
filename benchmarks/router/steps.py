"""When each stand-in makes its next step, in which every stream of it gets a token."""

from __future__ import annotations

import math
from enum import StrEnum

from benchmarks.router.tally import TOKENS, Tally

LOOK_S = 0.0005
"""Between two looks at what clients have read."""


class Pace(StrEnum):
    """HOLD: no step. CLOCK: a step of each engine every `step_s`. READ: as fast as clients read, half a round ahead.

    ONCE: each answer is complete with its first message.
    """

    HOLD = "hold"
    CLOCK = "clock"
    READ = "read"
    ONCE = "once"


class Steps:
    """The steps of `num_engines` engines, which take turns."""

    def __init__(self, num_engines: int, tally: Tally) -> None:
        self._num, self._tally = num_engines, tally
        self.pace, self._step_s = Pace.HOLD, math.inf
        self._turn, self._next_at = 0, math.inf
        self.num_emitted = 0

    def set(self, pace: Pace, step_s: float, now: float) -> None:
        """From `now` on."""
        self.pace, self._step_s, self._next_at = pace, step_s, now

    def due(self, now: float, num_running: int) -> int | None:
        """The engine whose step is due; None: none is. It counts as made."""
        if not num_running or self.pace in (Pace.HOLD, Pace.ONCE):
            return None
        if self.pace is Pace.READ and 2 * (self.num_emitted - self._tally.total(TOKENS)) > num_running:
            return None
        if self.pace is Pace.CLOCK:
            if now < self._next_at:
                return None
            self._next_at += self._step_s / self._num
        turn, self._turn = self._turn, (self._turn + 1) % self._num
        return turn

    def wait_s(self, now: float, num_running: int, most_s: float) -> float:
        """How long to wait until the next look."""
        if not num_running or self.pace in (Pace.HOLD, Pace.ONCE):
            return most_s
        return LOOK_S if self.pace is Pace.READ else min(most_s, max(0.0, self._next_at - now))
