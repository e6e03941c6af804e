"""The signals of a worker that autoscalers read. Pure.

The sum of a signal over a pool, divided by the value that one worker may have, is the number of workers that the pool
needs. A mean would never ask for more workers than there are. Each signal is work that is there now: when a worker
joins, the same work is spread over one more, and the sum stays. A signal that multiplies the number of workers by how
slow they were a minute ago asks for more again and again while the first ones still start.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.latency import StepModel, StepShape

KV_TARGET = 0.8
"""Share of the KV blocks in use at which a decode worker counts as full: above it, bursts end in preemption."""
ASSUMED_TOKENS_PER_S = 1000.0
"""The assumed prefill rate of a worker before its first full step."""
UNLOADED_SLACK = 1.25
"""A goal below what a lone row takes cannot be met by any number of workers: then the goal is so many times that."""


@dataclass(frozen=True, slots=True)
class DecodeLoad:
    """What a decode worker has: requests that own blocks (`num_held`) and that wait for some, and their context.

    `kv_usage`: the share of its KV blocks that requests own. `num_context_tokens` are those of `num_running` rows.
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
    """Seconds that a worker needs to compute `num_tokens` of prompts; 0 when nothing waits."""
    return num_tokens / (tokens_per_s if tokens_per_s > 0 else ASSUMED_TOKENS_PER_S)


def unblocked_share(kv_usage: float, num_running: int, num_transferring: int) -> float:
    """The share of a prefill worker's waiting prompts that wait for its computing.

    The others wait for memory that computed prompts hold until a decode worker takes them: more prefill workers would
    not help them. Computed prompts are taken to be about as long as those that run.
    """
    num_owners = num_running + num_transferring
    return 1.0 - kv_usage * num_transferring / num_owners if num_owners else 1.0


def reachable_goal_s(model: StepModel, context_each: float, goal_s: float) -> float:
    """The goal for the time of a token; where a lone row takes longer, `UNLOADED_SLACK` times what that takes."""
    return max(goal_s, UNLOADED_SLACK * model.seconds(StepShape.of_rows(1, round(context_each))))


def pressure(work: DecodeLoad, slo_tpot_s: float) -> float:
    """How many decode workers the work fills: by memory, or by speed where there is a goal for that (not 0).

    By speed: tokens a second over those of the largest step that meets the goal, by the worker's own model of its
    steps. A sum of rows would shrink by itself when a worker joins, because steps become shorter. Beyond that step it
    is rows over its rows: a worker that falls behind makes hardly more tokens. Requests that wait count like those that
    run, so a full pool asks for more than there is.
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
