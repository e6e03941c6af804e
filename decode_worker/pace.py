"""The gaps between steps of a decode worker: how long they should be, and how long they were. Pure.

Prefill workers may compute on the same cores. Even turns serve neither: prompts take twice as long, and meanwhile few
sequences share each step, which costs nearly as much as one of many. So prompts go first, and running sequences get a
token as often as they need one: with a goal for the time of a token that often, without one often enough that steps
take a quarter of the time, and no gap is long.
"""

from __future__ import annotations

from collections.abc import Iterable

from common.engine.sequences import TokenGoal
from common.observe import Ewma
from decode_worker.sequence import DecodeSequence

STEPS_SHARE = 0.25
"""The share of the time that steps take while prompts are computed on the same cores, without a goal."""
LONGEST_GAP_S = 0.1
"""The longest gap between two steps without a goal, unless a step itself takes longer: readers notice more."""
SMOOTHING = 0.2
"""The share of one more step in the average time of steps."""
RESERVE = 0.9
"""A gap is made this share of the time that a step may take: steps seldom take so long, and nothing makes up for a gap
that grows because the cores come late."""


class StepPace:
    """Keeps `goal`, for how long a token may take, if it is set."""

    def __init__(self, goal: TokenGoal) -> None:
        self._goal = goal
        self._step_s = Ewma(SMOOTHING)
        self._began_at = 0.0

    def began(self, now: float) -> None:
        """A step begins."""
        self._began_at = now

    def took(self, step_s: float) -> None:
        """A step took so long."""
        self._step_s.observe(step_s)

    @property
    def gap_s(self) -> float:
        """Seconds from the begin of a step to the begin of the next."""
        if self._goal.is_set:
            return RESERVE * self._goal.limit_s
        return min(LONGEST_GAP_S, self._step_s.value / STEPS_SHARE)

    def wait_s(self, now: float) -> float:
        """Seconds until the next step should begin."""
        return max(0.0, self._began_at + self.gap_s - now)


class TokenGaps:
    """A gap lies between two steps that have a sequence in common."""

    def __init__(self, goal: TokenGoal) -> None:
        self._goal, self._at = goal, 0.0
        self._sequences: set[DecodeSequence] = set()

    def stepped(
        self, sequences: Iterable[DecodeSequence], now: float, *, predicted_s: float, tokens_each: float
    ) -> None:
        """The tokens of a step came at `now`: `tokens_each` on average for each of these sequences that decode."""
        if not self._goal.is_set:
            return
        before, self._sequences = self._sequences, set(sequences)
        if not before.isdisjoint(self._sequences):
            self._goal.observe((now - self._at) / max(1.0, tokens_each), predicted_s)
        self._at = now
