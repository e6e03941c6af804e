"""How much of the goal for a token a step may be predicted to take, corrected by the gaps that clients see. Pure.

Predictions err, and messages, hand-overs and other processes take their time as well. So steps are planned for a share
of the goal. It grows by a little while 95 % of the stretches of some tokens keep the goal on average, and shrinks by a
part when they do not: additive increase, multiplicative decrease (Chiu and Jain, "Analysis of the increase and decrease
algorithms for congestion avoidance", Computer Networks and ISDN Systems, 1989). Single gaps say less: a process that
takes the cores now and then makes a few of them long whatever the steps are, and the goal is for an answer's mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from common.observe import Ewma

STRETCH = 16
"""Gaps whose mean is compared with the goal."""
PERIOD = 20
"""Stretches between two corrections."""
QUANTILE = 0.95
"""The share of stretches that are to keep the goal: the quantile of goals that name none."""
START, LEAST, MOST = 0.9, 0.5, 0.97
"""The share of the goal that a step may take: at first, at least, at most. The rest is for the gap before the second
token, which also holds a transfer."""
INCREASE, DECREASE, MOST_DECREASE = 0.02, 0.99, 0.9
"""A tail that exceeds the goal shrinks the share by as much, and a little more, but not by more than a tenth at once: a
stall says nothing about the steps."""
JOIN_STEPS = 2.0
"""Steps between an answer's first two tokens beside its own: half of the one that runs when its KV comes, the one that
was launched ahead, and about another half for the KV's way."""
LEAST_LEFT_SHARE = 0.75
"""The share of the goal that is left to steps however short answers are."""
LENGTH_SMOOTHING = 0.05
"""The share of one more answer in what joining the batch takes of the goal."""
MOST_LATE = PERIOD - math.ceil(QUANTILE * PERIOD)
"""Stretches of a period that may exceed the goal."""


class TokenGoal:
    """`goal_s`: seconds that a token after the first should take on average; 0: no goal.

    Joining the batch takes an answer some steps, so the fewer tokens answers have, the less is left for each of them.
    """

    def __init__(self, goal_s: float = 0.0) -> None:
        self.goal_s, self.share = goal_s, START
        self._left = Ewma(LENGTH_SMOOTHING, start=1.0)
        self._sum_s, self._num_gaps = 0.0, 0
        self._means: list[float] = []

    @property
    def is_set(self) -> bool:
        return self.goal_s > 0.0

    @property
    def limit_s(self) -> float:
        """Seconds that a step may be predicted to take; infinity without a goal."""
        return self.share * max(LEAST_LEFT_SHARE, self._left.value) * self.goal_s if self.is_set else math.inf

    def answered(self, num_tokens: int) -> None:
        """An answer of so many tokens was decoded."""
        if num_tokens > 1:
            num_gaps = num_tokens - 1
            self._left.observe(num_gaps / (num_gaps + JOIN_STEPS))

    def observe(self, gap_s: float, predicted_s: float) -> None:
        """A token came `gap_s` behind the one before it, from a step that was predicted to take `predicted_s`.

        A step that was predicted to miss the goal says nothing: it was not planned for the share.
        """
        self.observe_all((gap_s,), predicted_s)

    def observe_all(self, gaps_s: Iterable[float], predicted_s: float) -> None:
        """The same of tokens in a row, whose steps were predicted to take as long."""
        if not self.is_set or predicted_s > self.goal_s:
            return
        sum_s, num_gaps = self._sum_s, self._num_gaps
        for gap_s in gaps_s:
            sum_s, num_gaps = sum_s + gap_s, num_gaps + 1
            if num_gaps == STRETCH:
                self._stretched(sum_s / STRETCH)
                sum_s, num_gaps = 0.0, 0
        self._sum_s, self._num_gaps = sum_s, num_gaps

    def _stretched(self, mean_s: float) -> None:
        """A stretch has ended: correct the share if the period is over, or cannot be kept any more."""
        self._means.append(mean_s)
        late = sorted(mean_s for mean_s in self._means if mean_s > self.goal_s)
        if len(late) > MOST_LATE:  # whatever the rest of the period brings
            self._correct(self.share * max(MOST_DECREASE, DECREASE * self.goal_s / late[-1 - MOST_LATE]))
        elif len(self._means) == PERIOD:
            self._correct(self.share + INCREASE)

    def _correct(self, share: float) -> None:
        self._means.clear()
        self.share = min(MOST, max(LEAST, share))
