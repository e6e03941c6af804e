"""Finds requests whose workers are silent without looking at every request. Pure.

    add ─> asked at its time ── tokens came meanwhile ─> due anew, that long behind the last of them
                             └─ it is quiet ─> asked again at the next time that can change the answer

A look at ten thousand requests that wait takes ten milliseconds four times a second: their memory is in no cache.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from common.config import RouterConfig
from router.dispatch.request_state import Assignment, RequestState
from router.dispatch.silence import least_quiet_s, next_time, why_left
from router.fleet import Worker

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
        self._put(state, state.progress_at + self._least_s)

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
                if state.ask_at > now:
                    self._put(state, state.ask_at)
                elif (later := state.progress_at + self._least_s) >= now:
                    self._put(state, later)
                else:
                    idle_since, assignment = None, state.waits_for
                    if assignment is not None:
                        idle_since = workers[assignment.address].idle_since
                        if why := why_left(state, assignment, self._config, idle_since, now):
                            found[request_id] = (state, assignment, why)
                    self._put(state, next_time(state, self._config, idle_since, now, now + self._least_s))
        return [found[request_id] for request_id in states if request_id in found] if found else []

    def _put(self, state: RequestState, at: float) -> None:
        state.ask_at = at
        self._slots.setdefault(_slot_of(state), {})[state.request.request_id] = state


def _slot_of(state: RequestState) -> int:
    return int(state.ask_at // SLOT_S)
