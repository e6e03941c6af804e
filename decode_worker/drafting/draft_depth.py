"""How many tokens in a row a draft model should draft, from what its steps and the step behind them cost. Pure.

    draft step, draft step, ... (one for each token of a draft)  ─>  the step that checks all of them

The draft tokens of a text that repeats itself are found at no cost; those of a model are computed first, one after the
other, so a step with them takes as much longer. A model pays as long as its tokens are accepted often and its steps are
short beside those of the model that it drafts for, and never in a batch whose rows cost as much as a token brings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.engine.sequences import TokenGoal
from decode_worker.drafting.row_costs import LEAST_CHANCE, LEAST_GAIN, NO_GOAL, RowCosts, longest


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
