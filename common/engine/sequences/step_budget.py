"""Sizes of a worker's steps, chosen from predicted times within the limits of flags. Pure.

Without a latency goal, the limits apply. With one, a decode worker limits the prompt tokens per step and the number of
running sequences so that a step meets the goal for a token ("SLO batch size"; the chunk is chosen as in Agrawal et al.,
"Sarathi-Serve", OSDI 2024). A prefill worker uses the smallest step with nearly maximum throughput, because requests
that arrive during a step wait for its end.

If a flag is not given, `most` limits predictions, and `usual` applies while there is no prediction: the model is
unknown, or no size would meet the goal. If a flag is given, it sets both.

Predictions have errors, and messages, hand-overs and other processes also take time. Steps are therefore planned for a
share of the goal (`TokenGoal`), which is corrected by observed gaps between tokens. The share increases slightly while
95 % of the stretches of tokens meet the goal on average, and is reduced by a factor otherwise: additive increase,
multiplicative decrease (Chiu and Jain, "Analysis of the increase and decrease algorithms for congestion avoidance",
Computer Networks and ISDN Systems, 1989). Single gaps are not used, because occasional interference of other processes
makes some of them long regardless of the step, and because the goal applies to an answer's mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from common.latency import NOTHING, StepModel, StepShape
from common.observe import Ewma

STRETCH = 16
"""Number of gaps whose mean is compared with the goal."""
PERIOD = 20
"""Number of stretches between two corrections."""
QUANTILE = 0.95
"""Share of stretches that must meet the goal, the default quantile of goals."""
START, LEAST, MOST = 0.9, 0.5, 0.97
"""Share of the goal that a step may take: initial, minimum and maximum. The rest is for the gap before the second
token, which also includes a transfer."""
INCREASE, DECREASE, MOST_DECREASE = 0.02, 0.99, 0.9
"""A tail above the goal reduces the share proportionally, and slightly more, but by at most 10 % at a time, because a
stall is no evidence about steps."""
JOIN_STEPS = 2.0
"""Additional steps between an answer's first two tokens: half of the step that runs when its KV arrives, the step that
was launched ahead, and about half a step for the transfer."""
LEAST_LEFT_SHARE = 0.75
"""Minimum share of the goal available for steps, however short answers are."""
LENGTH_SMOOTHING = 0.05
"""Weight of the latest answer in the averages of its length and of the share of the goal that joining takes."""
MOST_LATE = PERIOD - math.ceil(QUANTILE * PERIOD)
"""Maximum number of stretches in a period that may exceed the goal."""
LEAST_CHUNK = 16
"""Minimum prompt tokens of a decode step, so that prompts always progress."""
LEAST_BATCH = 4
"""Minimum number of running sequences. Fewer would hardly reduce a step's time."""
LEAST_LEARNT_STEPS = 64
"""Number of steps to which a model must be fitted before it limits the batch. The first steps have a single sequence,
so that the model attributes the whole step time to a row."""
LEAST_LEARNT_PROMPTS = 16
"""Minimum number of steps before the model limits prefill steps. Steps of one size do not show the fixed part, which
would be taken for 0."""
LEAST_STEP = 64
"""Minimum prompt tokens of a prefill step."""
SIZES = 16
"""Number of prefill step sizes that are compared."""
EFFICIENT_SHARE = 0.99
"""The smallest step size with at least this share of the maximum predicted throughput is used."""
LEAST_STEP_S, LEAST_LATE_S = 0.1, 0.05
"""Minimum duration of such a step, and of one of late prompts, in seconds. A shorter one hardly helps those that wait,
and the fixed part of a step is poorly known: where all steps had one size, or other processes use the cores, a model
without it would choose the smallest size."""
LATE_SHARE = 0.8
"""Minimum share of the best throughput in steps of late prompts. They should delay others little."""
SLACK_SHARE = 0.5
"""Share of a new prompt's slack that a step of late prompts may always take."""
Reason = Literal["bound", "goal", "least", "missed", "efficiency", "gain", "cost"]
"""Reason for a value: limit of its flag; maximum for the goal; required minimum; limit, because no value meets the
goal; smallest efficient value; draft tokens that pay off, or do not."""


class TokenGoal:
    """`goal_s`: target mean time per output token after the first, in seconds; 0 for none.

    Joining the batch costs an answer some steps, so shorter answers have less time per token.
    """

    def __init__(self, goal_s: float = 0.0) -> None:
        self.goal_s, self.share = goal_s, START
        self._left = Ewma(LENGTH_SMOOTHING, start=1.0)
        self._length = Ewma(LENGTH_SMOOTHING)
        self._sum_s, self._num_gaps = 0.0, 0
        self._means: list[float] = []

    @property
    def is_set(self) -> bool:
        return self.goal_s > 0.0

    @property
    def limit_s(self) -> float:
        """Maximum predicted time of a step, in seconds; infinity without a goal."""
        return self.share * max(LEAST_LEFT_SHARE, self._left.value) * self.goal_s if self.is_set else math.inf

    def answered(self, num_tokens: int) -> None:
        """Record the length of a completed answer."""
        if num_tokens > 1:
            num_gaps = num_tokens - 1
            self._left.observe(num_gaps / (num_gaps + JOIN_STEPS))
            self._length.observe(num_gaps)

    def spare_s(self, step_s: float) -> float:
        """Return how long an answer of average length may wait and meet the goal, if its steps take `step_s`."""
        return self._length.value * max(0.0, self.goal_s - step_s)

    def observe(self, gap_s: float, predicted_s: float) -> None:
        """Record a token that arrived `gap_s` after the previous one, from a step predicted to take `predicted_s`.

        Steps that were predicted to miss the goal are ignored, because they were not planned for the share.
        """
        self.observe_all((gap_s,), predicted_s)

    def observe_all(self, gaps_s: Iterable[float], predicted_s: float) -> None:
        """Record gaps of consecutive tokens whose steps had the same prediction."""
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
        """Process a completed stretch. Corrects the share if the period is over or can no longer meet the goal."""
        self._means.append(mean_s)
        late = sorted(mean_s for mean_s in self._means if mean_s > self.goal_s)
        if len(late) > MOST_LATE:  # regardless of the rest of the period
            self._correct(self.share * max(MOST_DECREASE, DECREASE * self.goal_s / late[-1 - MOST_LATE]))
        elif len(self._means) == PERIOD:
            self._correct(self.share + INCREASE)

    def _correct(self, share: float) -> None:
        self._means.clear()
        self.share = min(MOST, max(LEAST, share))


@dataclass(frozen=True, slots=True)
class Knob:
    """Value of a self-tuned parameter, and its reason."""

    value: int
    reason: Reason


def local_chunk(
    model: StepModel, rows: StepShape, start: int, goal: TokenGoal, most: int, usual: int | None = None
) -> Knob:
    """Return the prompt tokens, from token `start`, that a decode step computes in addition to `rows`, up to `most`."""
    usual = most if usual is None else usual
    if not goal.is_set or not model.knows_prompts:
        return Knob(usual, "bound")
    if not rows.num_rows:
        return Knob(most, "bound")
    if model.seconds(rows) > goal.goal_s:
        return Knob(usual, "missed")
    return _within(model.most_tokens(start, rows, goal.limit_s), LEAST_CHUNK, most)


def batch_cap(model: StepModel, context: float, goal: TokenGoal, most: int, usual: int | None = None) -> Knob:
    """Return the maximum number of running sequences with `context` tokens on average, up to `most`."""
    usual = most if usual is None else usual
    if not goal.is_set or model.num_steps < LEAST_LEARNT_STEPS:
        return Knob(usual, "bound")
    empty_s, row_s = model.seconds(StepShape()), model.row_s + model.context_s * context
    if empty_s + row_s > goal.goal_s:
        return Knob(usual, "missed")
    left_s = max(0.0, goal.limit_s - empty_s)
    return _within(int(min(most, left_s / row_s)) if row_s > 0.0 else most, LEAST_BATCH, most)


def prefill_step(model: StepModel, start: int, most: int, *, has_goals: bool) -> Knob:
    """Return the tokens of a prefill step for prompts that are computed up to `start`, up to `most`."""
    is_learnt = model.knows_prompts and model.num_steps >= LEAST_LEARNT_PROMPTS
    if not has_goals or not is_learnt or most <= LEAST_STEP:
        return Knob(most, "bound")
    size = max(_efficient_step(model, start, most, EFFICIENT_SHARE), _tokens_in(LEAST_STEP_S, model, start, most))
    return Knob(size, "bound" if size == most else "efficiency")


def late_step(model: StepModel, start: int, most: int, slack_s: float) -> int:
    """Return the tokens of a prefill step in which all prompts have missed their goals, up to `most`.

    A prompt that arrives during the step waits for its end. `slack_s` is how long it may wait and still meet its goal.
    """
    if not model.knows_prompts or most <= LEAST_STEP:
        return most
    fitting = _tokens_in(max(LEAST_LATE_S, SLACK_SHARE * slack_s), model, start, most)
    return max(_efficient_step(model, start, most, LATE_SHARE), fitting)


def _tokens_in(seconds: float, model: StepModel, start: int, most: int) -> int:
    return min(most, model.most_tokens(start, NOTHING, seconds))


def _efficient_step(model: StepModel, start: int, most: int, share: float) -> int:
    """Return the smallest size that has at least `share` of the best rate.

    Later tokens of a prompt cost more attention, in large steps and in small ones. So sizes are compared by the mean
    cost of a token up to `start + most`: otherwise small steps would look efficient because they end sooner.
    """
    token_s = model.token_s + model.pair_s * (2 * start + most)
    rates = [(size / (model.fixed_s + max(model.floor_s, token_s * size)), size) for size in _step_sizes(most)]
    enough = share * max(rates)[0]
    return next(size for rate, size in rates if rate >= enough)


@lru_cache(maxsize=64)
def _step_sizes(most: int) -> tuple[int, ...]:
    """Return the prefill step sizes to compare."""
    return tuple(max(LEAST_STEP, most * count // SIZES) for count in range(1, SIZES + 1))


def _within(count: int, least: int, most: int) -> Knob:
    if max(count, least) >= most:
        return Knob(most, "bound")
    return Knob(count, "goal") if count >= least else Knob(least, "least")
