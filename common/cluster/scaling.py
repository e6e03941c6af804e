"""Signals of a worker for autoscalers. Pure.

The sum of a signal over a pool, divided by its target value per worker, is the number of workers that the pool needs. A
mean could never ask for more workers than exist. Each signal measures present work, so its sum stays the same when a
worker joins. A signal that multiplied the number of workers by their recent slowness would keep asking for more while
new workers start.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.latency import StepModel, StepShape

KV_TARGET = 0.8
"""Fraction of used KV blocks at which a decode worker counts as full. Above it, bursts cause preemptions."""
ASSUMED_TOKENS_PER_S = 1000.0
"""Assumed prefill rate of a worker before its first full step."""
UNLOADED_SLACK = 1.25
"""If a single sequence misses the goal, no number of workers meets it. Then this multiple of its time is the goal."""


RATE_WINDOW_S = 120.0
"""Window over which the computed prompts of a worker are averaged, in seconds. In a shorter one, randomly arriving
prompts make a pool of a few workers grow and shrink by one."""
DRAIN_S = 60.0
"""Time in which queued prompts should be computed by additional workers, in seconds. With a time below that of a
worker's start, a pool grows further while the first additional workers start."""


@dataclass(frozen=True, slots=True)
class DecodeLoad:
    """Load of a decode worker. `num_held` requests own blocks, `num_waiting` wait for some.

    `kv_usage` is the fraction of its KV blocks owned by requests. `num_context_tokens` is the context of `num_running`
    rows.
    """

    kv_usage: float
    num_held: int
    num_waiting: int
    num_running: int
    num_context_tokens: int
    model: StepModel

    @property
    def context_each(self) -> float:
        return self.num_context_tokens / self.num_running if self.num_running else 0.0


def backlog_s(num_tokens: float, tokens_per_s: float) -> float:
    """Return the seconds that a worker needs to compute `num_tokens` of prompts."""
    return num_tokens / (tokens_per_s if tokens_per_s > 0 else ASSUMED_TOKENS_PER_S)


def prefill_pressure(busy: float, waiting_s: float) -> float:
    """Return how many prefill workers the prompts fill.

    `busy` is the number of workers that the prompts computed recently keep busy, and `waiting_s` the time that one
    worker needs for the queued prompts. The queue alone is no signal: it is empty as long as the pool suffices, and
    grows without limit as soon as it does not.
    """
    return busy + waiting_s / DRAIN_S


def unblocked_share(kv_usage: float, num_running: int, num_transferring: int) -> float:
    """Return the fraction of a prefill worker's queued prompts that wait for computation.

    The others wait for memory held by computed prompts until a decode worker takes them, which more prefill workers
    would not change. Computed prompts are assumed to be as long as running ones.
    """
    num_owners = num_running + num_transferring
    return 1.0 - kv_usage * num_transferring / num_owners if num_owners else 1.0


def reachable_goal_s(model: StepModel, context_each: float, goal_s: float) -> float:
    """Return the goal for the time per token, or `UNLOADED_SLACK` times that of a single sequence if that is longer."""
    return max(goal_s, UNLOADED_SLACK * model.seconds(StepShape.of_rows(1, round(context_each))))


def pressure(work: DecodeLoad, slo_tpot_s: float) -> float:
    """Return how many decode workers the work fills, by memory or, with a goal, by speed (`slo_tpot_s` of 0: no goal).

    By speed: tokens per second relative to those of the largest step that meets the goal, by the worker's step model.
    The number of rows would shrink when a worker joins, because steps become shorter. Beyond that step, the number of
    rows is used, because an overloaded worker generates hardly more tokens. Waiting requests count like running ones,
    so a full pool asks for more workers.
    """
    coming = 1.0 + work.num_waiting / work.num_held if work.num_held else 1.0
    by_memory = work.kv_usage * coming / KV_TARGET
    num_rows = work.num_held + work.num_waiting
    if slo_tpot_s <= 0.0 or not num_rows or not work.model.is_known:
        return by_memory
    goal_s = reachable_goal_s(work.model, work.context_each, slo_tpot_s)
    step_s = work.model.seconds(StepShape.of_rows(num_rows, round(num_rows * work.context_each)))
    faster = goal_s / step_s if 0.0 < step_s < goal_s else 1.0
    return max(by_memory, faster * num_rows / max(1.0, work.model.most_rows(work.context_each, goal_s)))
