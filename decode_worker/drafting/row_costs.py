"""Costs of the rows of a step, measured while serving, and the number of draft tokens that pays. Pure.

    draft step, draft step, ... (one for each token of a draft)  ─>  the step that verifies all of them

Draft tokens from the text cost no computation. Those of a model are computed sequentially before the step, which takes
longer accordingly. A model pays if its tokens are often accepted and its steps are short compared with those of the
served model, and never in batches whose rows cost as much as a token gains.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from common.engine.sequences import TokenGoal

MIN_CHANCE = 0.1
"""Minimum acceptance probability of a draft token."""
MIN_GAIN = 1.05
"""Minimum gain in tokens per second by draft tokens, because the following step cannot be launched ahead."""
MAX_SLOWDOWN = 1.5
"""Maximum duration of a step with draft tokens, relative to one without: sequences without drafts wait for it too. If
there is a goal for the time per token that a plain step keeps, the limit is the goal instead."""
NO_GOAL = TokenGoal()


class RowCosts:
    """Decode step time as a function of the number of rows. Constant beyond the largest number observed."""

    SMOOTHING = 0.1
    FORGETTING = 0.002
    """Times of larger sizes drift to those of smaller ones, so that a slow size is tried again after some hundred
    steps."""
    RELAXING = 0.0005
    LARGEST_JUMP = 2.0
    """Maximum ratio of a step's time to the expected one. The excess has other causes."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._seconds: list[float] = []

    def add(self, num_rows: int, step_s: float) -> None:
        at = bisect_left(self._sizes, num_rows)
        if at == len(self._sizes) or self._sizes[at] != num_rows:
            expected = self.seconds(num_rows) or step_s
            self._sizes.insert(at, num_rows)
            self._seconds.insert(at, min(step_s, self.LARGEST_JUMP * expected))
        known = self._seconds[at]
        self._seconds[at] += self.SMOOTHING * (min(step_s, self.LARGEST_JUMP * known) - known)
        for larger in range(at + 1, len(self._sizes)):
            self._seconds[larger] += self.FORGETTING * (self._seconds[at] - self._seconds[larger])

    def relax(self) -> None:
        """Decay all times after a step was not run because of its cost, so that it is tried again eventually."""
        self._seconds = [(1.0 - self.RELAXING) * seconds for seconds in self._seconds]

    def seconds(self, num_rows: int) -> float:
        """Return the expected time of a step, or 0 before the first one."""
        at = bisect_left(self._sizes, num_rows)
        if at < len(self._sizes) and (self._sizes[at] == num_rows or not at):
            return self._seconds[at]
        if at == len(self._sizes):
            return self._seconds[-1] if at else 0.0
        (low, high), (fast, slow) = self._sizes[at - 1 : at + 1], self._seconds[at - 1 : at + 1]
        return fast + (slow - fast) * (num_rows - low) / (high - low)

    def rate(self, num_rows: int, chances: Sequence[float]) -> float:
        """Return the tokens per second of a step with `num_rows` certain tokens and these draft tokens."""
        return (num_rows + sum(chances)) / max(1e-9, self.seconds(num_rows + len(chances)))

    def worthwhile(
        self, num_rows: int, chances: Sequence[float], goal: TokenGoal = NO_GOAL, patience: float = 1.0
    ) -> int:
        """Return how many draft tokens with these acceptance probabilities, best first, maximise the tokens per second.

        `patience` is the expected number of tokens per sequence, by which the time limit is multiplied.
        """
        plain = self.seconds(num_rows)
        if not plain:
            return 0
        longest_s = patience * longest(plain, goal)
        count, tokens, best = 0, float(num_rows), MIN_GAIN * num_rows / plain
        for extra, chance in enumerate(chances, 1):
            tokens += chance
            seconds = self.seconds(num_rows + extra)
            if seconds > longest_s:
                break
            if tokens / seconds > best:
                count, best = extra, tokens / seconds
        return count


def longest(plain_s: float, goal: TokenGoal) -> float:
    """Return the maximum duration of a step with draft tokens that takes `plain_s` without."""
    return goal.limit_s if goal.is_set and plain_s <= goal.limit_s else MAX_SLOWDOWN * plain_s


@dataclass(frozen=True, slots=True)
class StepSize:
    """Number of `sequences` and `rows` of a step, and the expected number of `tokens`."""

    sequences: int
    rows: int
    tokens: float

    @classmethod
    def plain(cls, num_sequences: int) -> StepSize:
        """Return the size of a step without draft tokens."""
        return cls(num_sequences, num_sequences, float(num_sequences))


@dataclass(frozen=True, slots=True)
class Depth:
    """Number of draft tokens per sequence, and the expected tokens per second of a step with them."""

    num_tokens: int
    rate: float


def best_depth(
    steps: RowCosts,
    draft_steps: RowCosts,
    size: StepSize,
    num_drafting: int,
    chances: Sequence[float],
    goal: TokenGoal = NO_GOAL,
    *,
    most_rows: int,
    other_rate: float = 0.0,
) -> Depth:
    """Return the best number of draft tokens for each of `num_drafting` sequences of a step, or 0.

    `chances[i]` is the probability that the first i + 1 tokens of a draft are all accepted. `other_rate` is the
    expected tokens per second without the model's tokens, if higher than that of a plain step. If all sequences draft,
    the time limit is multiplied by the expected tokens of each.
    """
    plain_s = steps.seconds(size.sequences)
    if not plain_s:
        return Depth(0, 0.0)
    plain_rate = size.sequences / plain_s
    best = Depth(0, max(other_rate, plain_rate))
    least, longest_s = max(other_rate, MIN_GAIN * plain_rate), longest(plain_s, goal)
    gained, drafting_s = 0.0, 0.0
    for count, chance in enumerate(chances, 1):
        num_rows = size.rows + num_drafting * count
        if chance < MIN_CHANCE or not num_drafting or num_rows > most_rows:
            break
        gained += chance
        drafting_s += draft_steps.seconds(num_drafting)
        seconds = steps.seconds(num_rows) + drafting_s
        patience = 1.0 + gained if num_drafting == size.sequences else 1.0
        rate = (size.tokens + num_drafting * gained) / seconds
        if seconds <= patience * longest_s and rate > least:
            best, least = Depth(count, rate), rate
    return best
