"""How much a worker puts into a step: from predicted times, within the bounds that flags give. Pure.

Without a goal the bounds themselves hold. With one, a decode worker computes as many prompt tokens beside its sequences
and runs as many sequences as keep a step within the goal for a token ("SLO batch size"; Agrawal et al.,
"Sarathi-Serve", OSDI 2024, choose the chunk alike). A prefill worker takes the smallest step that loses hardly any
tokens a second: what comes while it runs waits for its end.

A flag that was not given bounds predictions by `most`, and the `usual` size holds while they do not choose: nothing is
known yet, or no size would meet the goal. A flag that was given is both.

Predictions err, and messages, hand-overs and other processes take their time as well. So steps are planned for a share
of the goal (`TokenGoal`), corrected by the gaps that clients see. It grows by a little while 95 % of the stretches of
some tokens keep the goal on average, and shrinks by a part when they do not: additive increase, multiplicative decrease
(Chiu and Jain, "Analysis of the increase and decrease algorithms for congestion avoidance", Computer Networks and ISDN
Systems, 1989). Single gaps say less: a process that takes the cores now and then makes a few of them long whatever the
steps are, and the goal is for an answer's mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from common.latency import StepModel, StepShape
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
LEAST_CHUNK = 16
"""Prompt tokens of a decode step, whatever the goal: prompts must come to their end."""
LEAST_BATCH = 4
"""Sequences that run side by side, whatever the goal: fewer would save hardly any of a step's time."""
LEAST_LEARNT_STEPS = 64
"""A model caps a batch once it is fitted to so many steps. The first few are of one sequence: to the model a row then
seems to cost the whole step."""
LEAST_STEP = 64
"""Prompt tokens of a prefill step."""
SIZES = 16
"""How many sizes of a prefill step are compared."""
EFFICIENT_SHARE = 0.97
"""The smallest size of a step is taken that is predicted to bring this share of the most tokens a second."""
Reason = Literal["bound", "goal", "least", "missed", "efficiency", "gain", "cost"]
"""Why a knob stands where it stands: at the bound of its flag; as far as the goal allows; at the least that is needed;
at the bound because no value would meet the goal; at the least that is efficient; draft tokens that pay, or do not."""


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


@dataclass(frozen=True, slots=True)
class Knob:
    """A number that a worker chooses by itself, and why it is this one."""

    value: int
    reason: Reason


def local_chunk(
    model: StepModel, rows: StepShape, start: int, goal: TokenGoal, most: int, usual: int | None = None
) -> Knob:
    """Prompt tokens, from token `start` on, that a decode step computes beside `rows`: at most `most`."""
    usual = most if usual is None else usual
    if not goal.is_set or not model.knows_prompts:
        return Knob(usual, "bound")
    if not rows.num_rows:
        return Knob(most, "bound")
    if model.seconds(rows) > goal.goal_s:
        return Knob(usual, "missed")
    return _within(model.most_tokens(start, rows, goal.limit_s), LEAST_CHUNK, most)


def batch_cap(model: StepModel, context: float, goal: TokenGoal, most: int, usual: int | None = None) -> Knob:
    """How many sequences of `context` tokens on average may run side by side: at most `most`."""
    usual = most if usual is None else usual
    if not goal.is_set or model.num_steps < LEAST_LEARNT_STEPS:
        return Knob(usual, "bound")
    empty_s, row_s = model.seconds(StepShape()), model.row_s + model.context_s * context
    if empty_s + row_s > goal.goal_s:
        return Knob(usual, "missed")
    left_s = max(0.0, goal.limit_s - empty_s)
    return _within(int(min(most, left_s / row_s)) if row_s > 0.0 else most, LEAST_BATCH, most)


def prefill_step(model: StepModel, start: int, most: int, *, has_goals: bool) -> Knob:
    """Tokens of a prefill worker's step whose prompts have been computed up to `start`: at most `most`."""
    if not has_goals or not model.knows_prompts or most <= LEAST_STEP:
        return Knob(most, "bound")
    sizes = _step_sizes(most)
    prompt_s = model.prompt_s
    rates = [size / prompt_s(start, start + size) for size in sizes]
    enough = EFFICIENT_SHARE * max(rates)
    size = next(size for size, rate in zip(sizes, rates, strict=True) if rate >= enough)
    return Knob(size, "bound" if size == most else "efficiency")


@lru_cache(maxsize=64)
def _step_sizes(most: int) -> tuple[int, ...]:
    """The sizes of a prefill step that are compared."""
    return tuple(max(LEAST_STEP, most * count // SIZES) for count in range(1, SIZES + 1))


def _within(count: int, least: int, most: int) -> Knob:
    if max(count, least) >= most:
        return Knob(most, "bound")
    return Knob(count, "goal") if count >= least else Knob(least, "least")
