"""What the rows of a step cost, measured while serving, and how many draft tokens are worth that. Pure.

    draft step, draft step, ... (one for each token of a draft)  ─>  the step that checks all of them

The draft tokens of a text that repeats itself are found at no cost; those of a model are computed first, one after the
other, so a step with them takes as much longer. A model pays as long as its tokens are accepted often and its steps are
short beside those of the model that it drafts for, and never in a batch whose rows cost as much as a token brings.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from common.engine.sequences import TokenGoal

LEAST_CHANCE = 0.1
"""A draft token that is less likely to be accepted is not considered."""
LEAST_GAIN = 1.05
"""Draft tokens must bring so many times the tokens a second, because the step behind them is not launched ahead."""
SLOWEST = 1.5
"""How many times as long a step may take with draft tokens: sequences without any wait for it, too. With a goal for the
time of a token, a step that would keep the goal may take as long as the goal allows."""
NO_GOAL = TokenGoal()


class RowCosts:
    """The time that decode steps take, by their number of rows. Rows beyond the largest known step count as free."""

    SMOOTHING = 0.1
    FORGETTING = 0.002
    """Larger sizes drift towards smaller ones, so that a slow size is tried again after a few hundred steps."""
    RELAXING = 0.0005
    LARGEST_JUMP = 2.0
    """A step that takes more times as long was held up by something else."""

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
        """Forget a little after a step was not run because it seemed to cost too much: it is tried again some day."""
        self._seconds = [(1.0 - self.RELAXING) * seconds for seconds in self._seconds]

    def seconds(self, num_rows: int) -> float:
        """The expected time of a step of so many rows; 0 before the first step."""
        at = bisect_left(self._sizes, num_rows)
        if at < len(self._sizes) and (self._sizes[at] == num_rows or not at):
            return self._seconds[at]
        if at == len(self._sizes):
            return self._seconds[-1] if at else 0.0
        (low, high), (fast, slow) = self._sizes[at - 1 : at + 1], self._seconds[at - 1 : at + 1]
        return fast + (slow - fast) * (num_rows - low) / (high - low)

    def rate(self, num_rows: int, chances: Sequence[float]) -> float:
        """Tokens a second of a step with these draft tokens, beside those that are certain."""
        return (num_rows + sum(chances)) / max(1e-9, self.seconds(num_rows + len(chances)))

    def worthwhile(
        self, num_rows: int, chances: Sequence[float], goal: TokenGoal = NO_GOAL, patience: float = 1.0
    ) -> int:
        """How many draft tokens with these chances of acceptance, best first, bring the most tokens a second.

        `patience`: each sequence of the step is expected to get so many tokens by it, and waits for them accordingly.
        """
        plain = self.seconds(num_rows)
        if not plain:
            return 0
        longest_s = patience * longest(plain, goal)
        count, tokens, best = 0, float(num_rows), LEAST_GAIN * num_rows / plain
        for extra, chance in enumerate(chances, 1):
            tokens += chance
            seconds = self.seconds(num_rows + extra)
            if seconds > longest_s:
                break
            if tokens / seconds > best:
                count, best = extra, tokens / seconds
        return count


def longest(plain_s: float, goal: TokenGoal) -> float:
    """How long a step with draft tokens may take, which takes `plain_s` without."""
    return goal.limit_s if goal.is_set and plain_s <= goal.limit_s else SLOWEST * plain_s


@dataclass(frozen=True, slots=True)
class StepSize:
    """A step of so many `sequences`, with `rows` in all, that is expected to bring `tokens`."""

    sequences: int
    rows: int
    tokens: float

    @classmethod
    def plain(cls, num_sequences: int) -> StepSize:
        """Without any draft tokens."""
        return cls(num_sequences, num_sequences, float(num_sequences))


@dataclass(frozen=True, slots=True)
class Depth:
    """How many tokens each sequence drafts, and how many tokens a second a step with them is expected to bring."""

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
    """The best number of draft tokens for each of `num_drafting` sequences of a step; 0 where they do not pay.

    `chances[i]` is the probability that a draft's first i + 1 tokens are all accepted. `other_rate` is what the step
    would bring without the model's tokens, in tokens a second, if that is more than a step without any.
    A step whose sequences all draft may take longer than others, by as much as each is expected to gain.
    """
    plain_s = steps.seconds(size.sequences)
    if not plain_s:
        return Depth(0, 0.0)
    plain_rate = size.sequences / plain_s
    best = Depth(0, max(other_rate, plain_rate))
    least, longest_s = max(other_rate, LEAST_GAIN * plain_rate), longest(plain_s, goal)
    gained, drafting_s = 0.0, 0.0
    for count, chance in enumerate(chances, 1):
        num_rows = size.rows + num_drafting * count
        if chance < LEAST_CHANCE or not num_drafting or num_rows > most_rows:
            break
        gained += chance
        drafting_s += draft_steps.seconds(num_drafting)
        seconds = steps.seconds(num_rows) + drafting_s
        patience = 1.0 + gained if num_drafting == size.sequences else 1.0
        rate = (size.tokens + num_drafting * gained) / seconds
        if seconds <= patience * longest_s and rate > least:
            best, least = Depth(count, rate), rate
    return best
