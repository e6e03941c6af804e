"""Pace of decode steps while prefill workers compute on the same cores. Pure.

Alternating evenly serves neither: prompts take twice as long, and steps with few sequences cost nearly as much as those
with many. Prompts therefore take precedence, and running sequences get a token as often as they need one: with a goal
for the time per token, at that rate; without one, so that steps take a quarter of the time and no gap is long.
"""

from __future__ import annotations

from collections.abc import Iterable

from common.engine.sequences import TokenGoal
from common.observe import Ewma
from decode_worker.sequence import DecodeSequence

STEPS_SHARE = 0.25
"""Share of the time for steps while prompts are computed on the same cores, without a goal."""
LONGEST_GAP_S = 0.1
"""Maximum gap between two steps without a goal, in seconds, unless a step takes longer. Readers notice more."""
SMOOTHING = 0.2
"""Weight of a new step in the average time."""
RESERVE = 0.9
"""Share of the goal that a gap may take. Steps are usually shorter, but a late start on busy cores is not
compensated."""


class StepPace:
    """Pace of steps that keeps `goal`, the maximum time per token, if it is set."""

    def __init__(self, goal: TokenGoal) -> None:
        self._goal = goal
        self._step_s = Ewma(SMOOTHING)
        self._began_at = 0.0

    def began(self, now: float) -> None:
        """Record the start of a step."""
        self._began_at = now

    def took(self, step_s: float) -> None:
        """Record the duration of a step."""
        self._step_s.observe(step_s)

    @property
    def gap_s(self) -> float:
        """Seconds between the starts of two steps."""
        if self._goal.is_set:
            return RESERVE * self._goal.limit_s
        return min(LONGEST_GAP_S, self._step_s.value / STEPS_SHARE)

    def wait_s(self, now: float) -> float:
        """Return the seconds until the next step should start."""
        return max(0.0, self._began_at + self.gap_s - now)


class TokenGaps:
    """Measures gaps between consecutive steps that have a sequence in common."""

    def __init__(self, goal: TokenGoal) -> None:
        self._goal, self._at = goal, 0.0
        self._sequences: set[DecodeSequence] = set()

    def stepped(
        self, sequences: Iterable[DecodeSequence], now: float, *, predicted_s: float, tokens_each: float
    ) -> None:
        """Record a step that completed at `now`, with `tokens_each` tokens on average for each decoding sequence."""
        if not self._goal.is_set:
            return
        before, self._sequences = self._sequences, set(sequences)
        if not before.isdisjoint(self._sequences):
            self._goal.observe((now - self._at) / max(1.0, tokens_each), predicted_s)
        self._at = now
