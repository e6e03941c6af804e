"""When a request leaves a living worker that sends nothing for it. Pure.

The worker may have lost a message, or its own message was lost: its heartbeats show neither. `QuietRequests` finds such
requests without looking at each of them: a look at ten thousand takes ten milliseconds, four times a second.

    add ─> asked at its time ── tokens came meanwhile ─> due again, that long after the last of them
                             └─ it is quiet ─> asked again at the next time that can change the answer
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from common.config import RouterConfig
from router.dispatch.request_state import Assignment, RequestState, Stage
from router.fleet import Worker


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
    quiet_s = now - max(state.times.progress_at, state.times.renewed_at)
    if quiet_s > limit_s:
        return f"{assignment.name} sent no token for {now - state.times.progress_at:.1f} s in the {state.stage} phase"
    if now - state.times.progress_at > config.worker_timeout_s:
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
        max(state.times.progress_at, state.times.renewed_at) + _limit_s(state, config),
        state.times.progress_at + config.worker_timeout_s,
    ]
    if idle_since is not None:
        ends.append(idle_since + config.worker_timeout_s)
    return min((end for end in ends if now <= end < latest), default=latest)


def _limit_s(state: RequestState, config: RouterConfig) -> float:
    return config.prefill_timeout_s if state.stage is Stage.PREFILL else config.token_timeout_s


SLOT_S = 0.05
"""Requests are kept in slots of so many seconds, by the time at which they are due."""


class QuietRequests:
    """Asks of each request often enough to find a silent worker as soon as by asking of all at each tick.

    Nothing makes a worker silent within `least_quiet_s` of a request's last token, so each is asked that often.
    """

    def __init__(self, config: RouterConfig) -> None:
        self._config, self._least_s = config, least_quiet_s(config)
        self._slots: dict[int, dict[str, RequestState]] = {}

    def add(self, state: RequestState) -> None:
        """A new request, until it is discarded."""
        self._put(state, state.times.progress_at + self._least_s)

    def discard(self, state: RequestState) -> None:
        """The request is over."""
        if (slot := self._slots.get(_slot_of(state))) is not None:
            slot.pop(state.request.request_id, None)

    def silent(
        self, states: Collection[str], workers: Mapping[str, Worker], now: float
    ) -> list[tuple[RequestState, Assignment, str]]:
        """Requests that leave a worker that looks healthy but lost a message, or whose message was lost, with why.

        They come in the order of `states`, the ids of all requests.
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
                        if why := why_left(state, assignment, self._config, idle_since, now):
                            found[request_id] = (state, assignment, why)
                    self._put(state, next_time(state, self._config, idle_since, now, now + self._least_s))
        return [found[request_id] for request_id in states if request_id in found] if found else []

    def _put(self, state: RequestState, at: float) -> None:
        state.times.ask_at = at
        self._slots.setdefault(_slot_of(state), {})[state.request.request_id] = state


def _slot_of(state: RequestState) -> int:
    return int(state.times.ask_at // SLOT_S)
