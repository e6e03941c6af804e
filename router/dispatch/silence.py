"""When a request leaves a living worker that sends nothing for it. Pure.

The worker may have lost a message, or its own message was lost: its heartbeats show neither.
"""

from __future__ import annotations

from common.config import RouterConfig
from router.dispatch.request_state import Assignment, RequestState, Stage


def least_quiet_s(config: RouterConfig) -> float:
    """How long a request may be without a token before `why_left` need be asked."""
    return min(config.prefill_timeout_s, config.token_timeout_s, config.worker_timeout_s)


def why_left(
    state: RequestState, assignment: Assignment, config: RouterConfig, idle_since: float | None, now: float
) -> str:
    """Why the request leaves the worker that it waits for; "" while the worker may still be computing.

    A worker that makes progress without a token reports it, and the wait for the token starts again. `idle_since`:
    since when the worker has had no request at all; None while it has some.
    """
    limit_s = _limit_s(state, config)
    quiet_s = now - max(state.progress_at, state.renewed_at)
    if quiet_s > limit_s:
        return f"{assignment.name} sent no token for {now - state.progress_at:.1f} s in the {state.stage} phase"
    if now - state.progress_at > config.worker_timeout_s:
        if state.stream.has_gap:
            return f"tokens of {assignment.name} are missing"
        if idle_since is not None and now - idle_since > config.worker_timeout_s:
            return f"{assignment.name} has lost the request"
    return ""


def next_time(state: RequestState, config: RouterConfig, idle_since: float | None, now: float, latest: float) -> float:
    """When `why_left` may say something else: at the end of one of its waits, and at `latest`.

    What comes until then begins waits that end later: tokens, and a heartbeat by which the worker is idle.
    """
    ends = [
        max(state.progress_at, state.renewed_at) + _limit_s(state, config),
        state.progress_at + config.worker_timeout_s,
    ]
    if idle_since is not None:
        ends.append(idle_since + config.worker_timeout_s)
    return min((end for end in ends if now <= end < latest), default=latest)


def _limit_s(state: RequestState, config: RouterConfig) -> float:
    return config.prefill_timeout_s if state.stage is Stage.PREFILL else config.token_timeout_s
