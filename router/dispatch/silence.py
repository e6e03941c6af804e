"""When a worker that lives is left all the same, because nothing comes of a request that it was given. Pure.

It may have lost a message of ours, or its own was lost: its heartbeats tell of neither.
"""

from __future__ import annotations

from common.config import RouterConfig
from router.dispatch.request_state import Assignment, RequestState, Stage


def why_left(
    state: RequestState, assignment: Assignment, config: RouterConfig, idle_since: float | None, now: float
) -> str:
    """Why the request leaves the worker that it waits for; "" while that one may still be at work on it.

    A worker that makes no token of it yet, but progress, says so: each time the wait for the token begins anew.
    `idle_since`: since when the worker has had no request at all; None for one that has some.
    """
    who = f"{assignment.role} worker {assignment.worker_id}"
    limit_s = config.prefill_timeout_s if state.stage is Stage.PREFILL else config.token_timeout_s
    quiet_s = now - max(state.progress_at, state.renewed_at)
    if quiet_s > limit_s:
        return f"{who} sent no token for {now - state.progress_at:.1f} s in the {state.stage} phase"
    if now - state.progress_at > config.worker_timeout_s:
        if state.stream.has_gap:
            return f"tokens of {who} are missing"
        if idle_since is not None and now - idle_since > config.worker_timeout_s:
            return f"{who} has lost the request"
    return ""
