"""What the tokens of answers take, by a model of steps, where it is known which other answers run beside them.

A router predicts a token's time when a request comes, from the batch of that moment. Answers that end, and those that
come later, change it. Here the batch is that of the whole run: what is left of the error is the model's. Without the
answers whose requests came later (`come_before`) it is the error that no prediction at a request's arrival undercuts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from common.latency.step_model import StepModel, StepShape

NUM_MOMENTS = 100


@dataclass(frozen=True, slots=True)
class Decoded:
    """An answer: when its request, its first and its last token came, in seconds, the later tokens, its prompt's."""

    came_at: float
    first_at: float
    last_at: float
    num_later: int
    num_prompt_tokens: int


def come_before(answer: Decoded, others: Sequence[Decoded]) -> list[Decoded]:
    """The answers whose requests were there when that of `answer` came."""
    return [other for other in others if other.came_at <= answer.came_at]


def token_seconds(answer: Decoded, others: Sequence[Decoded], model: StepModel) -> float:
    """Seconds of each later token of `answer`, on a worker that decoded `others` (itself among them or not) and it.

    At each of `NUM_MOMENTS` the batch is looked at: tokens come as often as steps of it end.
    """
    beside = [other for other in others if other is not answer]
    first, last, later, prompt = (
        np.array([getattr(other, name) for other in beside], dtype=np.float64)
        for name in ("first_at", "last_at", "num_later", "num_prompt_tokens")
    )
    steps_a_second = 0.0
    for share in (np.arange(NUM_MOMENTS) + 0.5) / NUM_MOMENTS:
        at = answer.first_at + share * (answer.last_at - answer.first_at)
        runs = (first <= at) & (at < last)
        done = (at - first[runs]) / (last[runs] - first[runs])
        context = float(np.sum(prompt[runs] + done * later[runs]))
        context += answer.num_prompt_tokens + share * answer.num_later
        steps_a_second += 1.0 / model.seconds(StepShape.of_rows(1 + int(runs.sum()), round(context)))
    return NUM_MOMENTS / steps_a_second
