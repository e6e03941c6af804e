"""Time of one forward pass as a function of its work.

    seconds = fixed + max(floor, token * T + pair * P) + row * B + context * C

T is the number of prompt tokens, P the sum of n^2 - p^2 over chunks of prompts from token p to token n, B the number of
decoded rows, and C their total context. The first terms are the usual model of prefill, with a floor for steps of few
tokens, which read all weights. The others are the usual model of decode (Zhong et al., "DistServe", OSDI 2024; Agrawal
et al., "Vidur", MLSys 2024). A step of a decode worker may contain both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import Meta

MOST_TOKENS = 1 << 30
"""Limit for models in which tokens cost nothing."""
LARGEST_COST = 1e6
"""Maximum reported cost in seconds. Larger values could make sums infinite."""
Cost = Annotated[float, Meta(ge=0.0, le=LARGEST_COST)]
"""Seconds, finite: infinity and NaN would spread through sums."""


class StepShape(msgspec.Struct, frozen=True, gc=False):
    """Work of a step. The fields are T, P, B and C of the module docstring."""

    num_tokens: int = 0
    num_pairs: int = 0
    num_rows: int = 0
    context: int = 0

    @classmethod
    def of_prompt(cls, start: int, end: int) -> StepShape:
        """Return the work of a prompt's tokens from `start` to `end`."""
        return cls(num_tokens=end - start, num_pairs=end * end - start * start)

    @classmethod
    def of_rows(cls, num_rows: int, context: int) -> StepShape:
        """Return the work of decoded rows with `context` tokens in total."""
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
    """Coefficients, in seconds, of one worker.

    `error` is the recent average of |predicted - measured| / measured for new steps. `num_steps` were observed; 0 means
    unknown.
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
        """Whether the observed steps include prompts. A decode worker may not have computed any."""
        return self.token_s > 0.0 or self.pair_s > 0.0

    def seconds(self, shape: StepShape) -> float:
        """Return the time of one step."""
        prompt_s = self.token_s * shape.num_tokens + self.pair_s * shape.num_pairs
        rows_s = self.row_s * shape.num_rows + self.context_s * shape.context
        floor_s = self.floor_s
        return self.fixed_s + (prompt_s if prompt_s > floor_s else floor_s) + rows_s

    def prompt_s(self, start: int, end: int) -> float:
        """Return the time of a step that computes a prompt's tokens from `start` to `end`."""
        prompt_s = self.token_s * (end - start) + self.pair_s * (end * end - start * start)
        floor_s = self.floor_s  # `max` is slower: a prefill worker compares sizes before each step
        return self.fixed_s + (prompt_s if prompt_s > floor_s else floor_s)

    def tokens_per_s(self, num_tokens: int) -> float:
        """Return the rate of steps with `num_tokens` tokens at the start of prompts; 0 if unknown."""
        if not self.knows_prompts:
            return 0.0
        return num_tokens / max(1e-6, self.seconds(StepShape.of_prompt(0, num_tokens)))

    def steps_s(self, shape: StepShape, most_tokens: int, decode_rows: StepShape = NOTHING) -> float:
        """Return the time to compute `shape` in steps of `most_tokens` prompt tokens, each with `decode_rows`."""
        if not shape.num_tokens:
            return 0.0
        num_steps = shape.num_tokens / max(1, most_tokens)
        num_full = int(num_steps)
        share = num_full / num_steps  # fraction of the work in full steps
        prompt_s = self.token_s * shape.num_tokens + self.pair_s * shape.num_pairs
        computed_s = max(num_full * self.floor_s, share * prompt_s)
        if share < 1.0:
            computed_s += max(self.floor_s, (1.0 - share) * prompt_s)
        rows_s = self.row_s * decode_rows.num_rows + self.context_s * decode_rows.context
        return -int(-num_steps // 1) * (self.fixed_s + rows_s) + computed_s

    def most_rows(self, context_each: float, limit_s: float) -> float:
        """Return the maximum number of rows, each with `context_each` tokens, in a step of at most `limit_s`.

        Not rounded, because a pool's load is a sum of fractions. At least 0; infinity if rows take no time.
        """
        each_s = self.row_s + self.context_s * context_each
        left_s = limit_s - self.fixed_s - self.floor_s
        if each_s <= 0.0:
            return math.inf if left_s >= 0.0 else 0.0
        return max(0.0, left_s / each_s)

    def most_tokens(self, start: int, decode_rows: StepShape, limit_s: float) -> int:
        """Return the maximum number of prompt tokens from `start` on in a step of `limit_s` with `decode_rows`."""
        left_s = limit_s - self.seconds(decode_rows) + self.floor_s
        if left_s < self.floor_s:
            return 0
        # Solve token * t + pair * ((start + t)^2 - start^2) = left_s for t, without cancellation.
        linear = self.token_s + 2 * self.pair_s * start
        slope_s = linear + (linear * linear + 4 * self.pair_s * left_s) ** 0.5
        return int(min(MOST_TOKENS, 2 * left_s / slope_s)) if slope_s > 0.0 else MOST_TOKENS
