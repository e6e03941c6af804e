"""How much of the goal for a token a step may be predicted to take, corrected by the gaps that clients see. Pure.

Predictions err, and messages, hand-overs and other processes take their time as well. So steps are planned for a share
of the goal. It grows by a little while 95 % of the stretches of some tokens keep the goal on average, and shrinks by a
part when they do not: additive increase, multiplicative decrease (Chiu and Jain, "Analysis of the increase and decrease
algorithms for congestion avoidance", Computer Networks and ISDN Systems, 1989). Single gaps say less: a process that
takes the cores now and then makes a few of them long whatever the steps are, and the goal is for an answer's mean.
"""

from __future__ import annotations

import math

STRETCH = 16
"""Gaps whose mean is compared with the goal."""
PERIOD = 20
"""Stretches between two corrections."""
QUANTILE = 0.95
START, LEAST, MOST = 0.8, 0.5, 0.9
"""Shares. The rest at most is for the gap before the second token, which also holds a transfer."""
INCREASE, DECREASE = 0.01, 0.9


class TokenGoal:
    """`goal_s`: seconds that a token after the first should take; 0: no goal."""

    def __init__(self, goal_s: float = 0.0) -> None:
        self.goal_s, self.share = goal_s, START
        self._sum_s, self._num_gaps = 0.0, 0
        self._means: list[float] = []

    @property
    def is_set(self) -> bool:
        return self.goal_s > 0.0

    @property
    def limit_s(self) -> float:
        """Seconds that a step may be predicted to take; infinity without a goal."""
        return self.share * self.goal_s if self.is_set else math.inf

    def observe(self, gap_s: float, predicted_s: float) -> None:
        """A token came `gap_s` behind the one before it, from a step that was predicted to take `predicted_s`.

        A step that was predicted to miss the goal says nothing: it was not planned for the share.
        """
        if not self.is_set or predicted_s > self.goal_s:
            return
        self._sum_s, self._num_gaps = self._sum_s + gap_s, self._num_gaps + 1
        if self._num_gaps < STRETCH:
            return
        self._means.append(self._sum_s / STRETCH)
        self._sum_s, self._num_gaps = 0.0, 0
        if len(self._means) == PERIOD:
            self._correct()

    def _correct(self) -> None:
        tail_s = sorted(self._means)[math.ceil(QUANTILE * PERIOD) - 1]
        self._means.clear()
        share = self.share * DECREASE if tail_s > self.goal_s else self.share + INCREASE
        self.share = min(MOST, max(LEAST, share))
