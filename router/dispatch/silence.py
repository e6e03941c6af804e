"""Detection of requests that a live worker no longer serves, because a message was lost. Pure.

Heartbeats do not show lost messages. Checking all requests at each tick would take 10 ms for ten thousand, so each is
checked only when its state can have changed:

    add ─> checked when due ── tokens came since ─> due again, the same time after the last of them
                             └─ silent ─> checked at the next time that can change the result
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from common.config import RouterConfig
from router.dispatch.request_state import Assignment, RequestState, Stage
from router.fleet import Worker


def min_silence_s(config: RouterConfig) -> float:
    """Return the minimum time without a token after which `silence_reason` can report silence."""
    return min(config.prefill_timeout_s, config.token_timeout_s, config.worker_timeout_s)


def silence_reason(
    state: RequestState, assignment: Assignment, config: RouterConfig, idle_since: float | None, now: float
) -> str:
    """Return why the request must leave the worker that it waits for, or "" while the worker may still be computing.

    A worker that reports progress without a token restarts the timeout. `idle_since` is the time since which the worker
    has had no request, None if it has some.
    """
    limit_s = _limit_s(state, config)
    silent_s = now - max(state.times.progress_at, state.times.renewed_at)
    if silent_s > limit_s:
        return f"{assignment.name} sent no token for {now - state.times.progress_at:.1f} s in the {state.stage} phase"
    if now - state.times.progress_at > config.worker_timeout_s:
        if state.stream.has_gap:
            return f"tokens of {assignment.name} are missing"
        if idle_since is not None and now - idle_since > config.worker_timeout_s:
            return f"{assignment.name} has lost the request"
    return ""


def next_time(state: RequestState, config: RouterConfig, idle_since: float | None, now: float, latest: float) -> float:
    """Return the next time at which `silence_reason` may change its result: the end of a timeout, at most `latest`.

    Events until then only start timeouts that end later.
    """
    ends = [
        max(state.times.progress_at, state.times.renewed_at) + _limit_s(state, config),
        state.times.progress_at + config.worker_timeout_s,
    ]
    if idle_since is not None:
        ends.append(idle_since + config.worker_timeout_s)
    return min((end for end in ends if now <= end < latest), default=latest)


def _limit_s(state: RequestState, config: RouterConfig) -> float:
    return config.prefill_timeout_s if state.stage is Stage.PREFILL else config.token_timeout_s


SLOT_S = 0.05
"""Resolution of the timer wheel that stores requests by due time, in seconds."""


class SilenceDetector:
    """Finds silent requests as early as a check of all of them at each tick would.

    No request becomes silent within `min_silence_s` of its last token, so each is checked at that interval.
    """

    def __init__(self, config: RouterConfig) -> None:
        self._config, self._least_s = config, min_silence_s(config)
        self._slots: dict[int, dict[str, RequestState]] = {}

    def add(self, state: RequestState) -> None:
        """Track a new request until it is discarded."""
        self._put(state, state.times.progress_at + self._least_s)

    def discard(self, state: RequestState) -> None:
        """Stop tracking a request."""
        if (slot := self._slots.get(_slot_of(state))) is not None:
            slot.pop(state.request.request_id, None)

    def silent(
        self, states: Collection[str], workers: Mapping[str, Worker], now: float
    ) -> list[tuple[RequestState, Assignment, str]]:
        """Return the requests that must leave a healthy-looking worker, with the reason.

        They are in the order of `states`, the ids of all requests.
        """
        found: dict[str, tuple[RequestState, Assignment, str]] = {}
        due = [self._slots.pop(number) for number in [one for one in self._slots if one * SLOT_S <= now]]
        for slot in due:
            for request_id, state in slot.items():
                if state.times.ask_at > now:
                    self._put(state, state.times.ask_at)
                elif (later := state.times.progress_at + self._least_s) >= now:
                    self._put(state, later)
                else:
                    idle_since, assignment = None, state.waits_for
                    if assignment is not None:
                        idle_since = workers[assignment.address].life.idle_since
                        if why := silence_reason(state, assignment, self._config, idle_since, now):
                            found[request_id] = (state, assignment, why)
                    self._put(state, next_time(state, self._config, idle_since, now, now + self._least_s))
        return [found[request_id] for request_id in states if request_id in found] if found else []

    def _put(self, state: RequestState, at: float) -> None:
        state.times.ask_at = at
        self._slots.setdefault(_slot_of(state), {})[state.request.request_id] = state


def _slot_of(state: RequestState) -> int:
    return int(state.times.ask_at // SLOT_S)
