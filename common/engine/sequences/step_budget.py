"""How much a worker puts into a step: from predicted times, within the bounds that flags give. Pure.

Without a goal the bounds themselves hold. With one, a decode worker computes as many prompt tokens beside its sequences
and runs as many sequences as keep a step within the goal for a token ("SLO batch size"; Agrawal et al.,
"Sarathi-Serve", OSDI 2024, choose the chunk alike). A prefill worker takes the smallest step that loses hardly any
tokens a second: what comes while it runs waits for its end.

A flag that was not given bounds predictions by `most`, and the `usual` size holds while they do not choose: nothing is
known yet, or no size would meet the goal. A flag that was given is both.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from common.engine.sequences.token_goal import TokenGoal
from common.latency import StepModel, StepShape

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
