"""The time of one forward pass, as a function of what it computes.

    seconds = fixed + max(floor, token * T + pair * P) + row * B + context * C

T prompt tokens, P = sum of n^2 - p^2 over chunks of prompts from token p to token n, B decoded rows, and C the tokens
that these rows see. The first two terms are the usual model of prefill, with the floor that a step of few tokens has
because it reads all weights; the others are that of decode (Zhong et al., "DistServe", OSDI 2024; Agrawal et al.,
"Vidur", MLSys 2024). A step of a decode worker may hold both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import Meta

MOST_TOKENS = 1 << 30
"""Where tokens cost nothing."""
LARGEST_COST = 1e6
"""Seconds of any part of a step that a worker may tell of: more would spread infinity through sums."""
Cost = Annotated[float, Meta(ge=0.0, le=LARGEST_COST)]
"""Seconds; infinity and NaN would spread through every sum."""


class StepShape(msgspec.Struct, frozen=True, gc=False):
    """What a step computes: see the letters above."""

    num_tokens: int = 0
    num_pairs: int = 0
    num_rows: int = 0
    context: int = 0

    @classmethod
    def of_prompt(cls, start: int, end: int) -> StepShape:
        """A prompt's tokens from `start` to `end`."""
        return cls(num_tokens=end - start, num_pairs=end * end - start * start)

    @classmethod
    def of_rows(cls, num_rows: int, context: int) -> StepShape:
        """Decoded rows that see `context` tokens in all."""
        return cls(num_rows=num_rows, context=context)

    def __add__(self, other: StepShape) -> StepShape:
        return StepShape(
            self.num_tokens + other.num_tokens,
            self.num_pairs + other.num_pairs,
            self.num_rows + other.num_rows,
            self.context + other.context,
        )

    def __sub__(self, other: StepShape) -> StepShape:
        return StepShape(
            self.num_tokens - other.num_tokens,
            self.num_pairs - other.num_pairs,
            self.num_rows - other.num_rows,
            self.context - other.context,
        )

    @classmethod
    def sum(cls, shapes: Iterable[StepShape]) -> StepShape:
        total = cls()
        for shape in shapes:
            total += shape
        return total


NOTHING = StepShape()


class StepModel(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The coefficients, in seconds, of one worker.

    `error`: the recent average of |predicted - measured| / measured, of steps that the model had not seen.
    `num_steps` steps were observed; 0 says that nothing is known.
    """

    fixed_s: Cost = 0.0
    floor_s: Cost = 0.0
    token_s: Cost = 0.0
    pair_s: Cost = 0.0
    row_s: Cost = 0.0
    context_s: Cost = 0.0
    error: Cost = 0.0
    num_steps: Annotated[int, Meta(ge=0, le=2**62)] = 0

    @property
    def is_known(self) -> bool:
        return self.num_steps > 0

    @property
    def knows_prompts(self) -> bool:
        """Whether steps with prompts were among them: a decode worker may have computed none."""
        return self.token_s > 0.0 or self.pair_s > 0.0

    def seconds(self, shape: StepShape) -> float:
        """The time of one step."""
        prompt_s = self.token_s * shape.num_tokens + self.pair_s * shape.num_pairs
        rows_s = self.row_s * shape.num_rows + self.context_s * shape.context
        floor_s = self.floor_s
        return self.fixed_s + (prompt_s if prompt_s > floor_s else floor_s) + rows_s

    def prompt_s(self, start: int, end: int) -> float:
        """The time of a step that computes a prompt's tokens from `start` to `end`."""
        prompt_s = self.token_s * (end - start) + self.pair_s * (end * end - start * start)
        floor_s = self.floor_s  # no call of max: a prefill worker compares sizes before each step
        return self.fixed_s + (prompt_s if prompt_s > floor_s else floor_s)

    def tokens_per_s(self, num_tokens: int) -> float:
        """The rate of steps of so many tokens at the beginning of prompts; 0 while nothing is known of prompts."""
        if not self.knows_prompts:
            return 0.0
        return num_tokens / max(1e-6, self.seconds(StepShape.of_prompt(0, num_tokens)))

    def steps_s(self, shape: StepShape, most_tokens: int, beside: StepShape = NOTHING) -> float:
        """The time of steps that compute `shape`, `most_tokens` prompt tokens each and `beside` in each of them."""
        if not shape.num_tokens:
            return 0.0
        num_steps = shape.num_tokens / max(1, most_tokens)
        num_full = int(num_steps)
        share = num_full / num_steps  # of the work that full steps do
        prompt_s = self.token_s * shape.num_tokens + self.pair_s * shape.num_pairs
        computed_s = max(num_full * self.floor_s, share * prompt_s)
        if share < 1.0:
            computed_s += max(self.floor_s, (1.0 - share) * prompt_s)
        rows_s = self.row_s * beside.num_rows + self.context_s * beside.context
        return -int(-num_steps // 1) * (self.fixed_s + rows_s) + computed_s

    def most_rows(self, context_each: float, limit_s: float) -> float:
        """The most decoded rows, each of which sees `context_each` tokens, in a step of at most `limit_s`.

        Not rounded: a pool's load is a sum of shares. At least 0; infinity where rows take no time.
        """
        each_s = self.row_s + self.context_s * context_each
        left_s = limit_s - self.fixed_s - self.floor_s
        if each_s <= 0.0:
            return math.inf if left_s >= 0.0 else 0.0
        return max(0.0, left_s / each_s)

    def most_tokens(self, start: int, beside: StepShape, limit_s: float) -> int:
        """The most prompt tokens from `start` on that a step of at most `limit_s` holds beside `beside`."""
        left_s = limit_s - self.seconds(beside) + self.floor_s
        if left_s < self.floor_s:
            return 0
        # token * t + pair * ((start + t)^2 - start^2) = left_s, solved for t without a difference of near numbers
        linear = self.token_s + 2 * self.pair_s * start
        slope_s = linear + (linear * linear + 4 * self.pair_s * left_s) ** 0.5
        return int(min(MOST_TOKENS, 2 * left_s / slope_s)) if slope_s > 0.0 else MOST_TOKENS
