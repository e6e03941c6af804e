"""How much of the goal for a token a step may be predicted to take, corrected by the gaps that clients see. Pure.

Predictions err, and messages, hand-overs and other processes take their time as well. So steps are planned for a share
of the goal. It grows by a little while 95 % of the gaps between tokens are within the goal, and shrinks by a part when
they are not: additive increase, multiplicative decrease (Chiu and Jain, "Analysis of the increase and decrease
algorithms for congestion avoidance", Computer Networks and ISDN Systems, 1989).
"""

from __future__ import annotations

import math

PERIOD = 100
"""Gaps between two corrections."""
QUANTILE = 0.95
START, LEAST, MOST = 0.8, 0.5, 0.9
"""Shares. The rest at most is for the gap before the second token, which also holds a transfer."""
INCREASE, DECREASE = 0.01, 0.9


class TokenGoal:
    """`goal_s`: seconds that a token after the first should take; 0: no goal."""

    def __init__(self, goal_s: float = 0.0) -> None:
        self.goal_s, self.share = goal_s, START
        self._gaps: list[float] = []

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
        self._gaps.append(gap_s)
        if len(self._gaps) < PERIOD:
            return
        tail_s = sorted(self._gaps)[math.ceil(QUANTILE * PERIOD) - 1]
        self._gaps.clear()
        share = self.share * DECREASE if tail_s > self.goal_s else self.share + INCREASE
        self.share = min(MOST, max(LEAST, share))
