"""The load over time that pools are planned for, and the workers that they have: an 8B model on GPUs."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from common.latency.step_model import StepModel
from common.wire.message_fields import Role
from router.planner.offered_load import SampledRequest
from router.planner.pool import Bounds, Goals, WorkerKind

MODEL: Final = StepModel(
    fixed_s=4e-3, floor_s=8e-3, token_s=4e-5, pair_s=1.5e-9, row_s=3e-5, context_s=2.5e-8, num_steps=1000
)
KINDS: Final[dict[Role, WorkerKind]] = {
    "prefill": WorkerKind(MODEL, num_blocks=25_000, block_size=16, max_num_seqs=64, step_tokens=2048),
    "decode": WorkerKind(MODEL, num_blocks=25_000, block_size=16, max_num_seqs=128, step_tokens=512),
}
GOALS: Final = Goals(0.5, 0.025, 0.95)
BOUNDS: Final[dict[Role, Bounds]] = {"prefill": Bounds(1, 40), "decode": Bounds(1, 40)}


def conversation(chance: random.Random) -> SampledRequest:
    """Log-normal lengths about those of the Azure conversation trace of 2023: medians of 900 and 180 tokens."""
    num_prompt = min(8000, max(70, round(chance.lognormvariate(6.8, 0.8))))
    return SampledRequest(num_prompt, 0, min(1000, max(8, round(chance.lognormvariate(5.2, 0.6)))))


@dataclass(frozen=True)
class Load:
    """A rate over time, and what a worker takes to start."""

    name: str
    rate: Callable[[float], float]
    seconds: float
    start_s: float = 30.0


def sine(low: float, high: float, period_s: float) -> Callable[[float], float]:
    return lambda at: low + (high - low) * (1 - math.cos(2 * math.pi * at / period_s)) / 2


def loads(seconds: float) -> Iterator[Load]:
    yield Load("sine 5-45/s", sine(5.0, 45.0, 1200.0), seconds)
    yield Load("sine, starts of 120 s", sine(5.0, 45.0, 1200.0), seconds, 120.0)
    yield Load("steady 20/s", lambda at: 20.0, seconds)
    yield Load("burst 8 to 32/s", lambda at: 32.0 if seconds / 3 <= at < seconds / 2 else 8.0, seconds)
    yield Load("idle between", lambda at: 15.0 if at % 1800.0 < 600.0 else 0.0, seconds)
