"""The signals of a worker that autoscalers read. Pure.

The sum of a signal over a pool, divided by the value that one worker may have, is the number of workers that the pool
needs. A mean would never ask for more workers than there are.
"""

from __future__ import annotations

from common.worker.engine import EngineStatus

KV_TARGET = 0.8
"""Share of the KV blocks in use at which a decode worker counts as full: above it, bursts end in preemption."""
ASSUMED_TOKENS_PER_S = 1000.0
"""The assumed prefill rate of a worker before its first full step."""


def backlog_s(num_tokens: float, tokens_per_s: float) -> float:
    """Seconds that a worker needs to compute `num_tokens` of prompts; 0 when nothing waits."""
    return num_tokens / (tokens_per_s if tokens_per_s > 0 else ASSUMED_TOKENS_PER_S)


def pressure(kv_usage: float, tpot_s: float, slo_tpot_s: float) -> float:
    """How full a decode worker is, 1 at its limit: by memory, or by speed where there is a goal for that (not 0)."""
    return max(kv_usage / KV_TARGET, tpot_s / slo_tpot_s if slo_tpot_s > 0 else 0.0)


def active_requests(status: EngineStatus) -> int:
    """Requests that would break off if the worker ended now."""
    return status.num_running + status.num_waiting + status.num_transferring
