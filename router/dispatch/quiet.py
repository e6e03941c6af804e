"""Finds requests whose workers are silent, by a heap of times, so that no tick looks at all requests. Pure.

    add ─> asked at its time ── tokens came meanwhile ─> due anew, that long behind the last of them
                             └─ it is quiet ─> asked again at the next time that can change the answer
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from itertools import count

from common.config import RouterConfig
from router.dispatch.silence import least_quiet_s, next_times, why_left
from router.fleet.worker import Worker
from router.streams.request_state import Assignment, RequestState


MOST_S = 10.0
"""Between two times at which the same request is asked: so long its id stays behind its end."""


class QuietRequests:
    """Asks of each request often enough to find a silent worker as soon as by asking of all at each tick.

    Nothing can make a worker silent within `least_quiet_s` of a request's last token, so each is asked at least that
    often. The heap has ids, and not the requests, which may be large and over.
    """

    def __init__(self, config: RouterConfig) -> None:
        self._config, self._least_s = config, min(MOST_S, least_quiet_s(config))
        self._numbers = count()
        self._heap: list[tuple[float, int, str]] = []

    def add(self, state: RequestState) -> None:
        """A new request, until it is found to be over."""
        due = state.progress_at + self._least_s
        heapq.heappush(self._heap, (due, next(self._numbers), state.request.request_id))

    def silent(
        self, states: Mapping[str, RequestState], workers: Mapping[str, Worker], now: float
    ) -> list[tuple[RequestState, Assignment, str]]:
        """Requests that leave a worker that looks healthy but lost a message, or whose message was lost, with why."""
        found = []
        for number, state in self._due(states, now):
            idle_since, assignment = None, state.waits_for
            if assignment is not None:
                idle_since = workers[assignment.address].idle_since
                if why := why_left(state, assignment, self._config, idle_since, now):
                    found.append((state, assignment, why))
            times = next_times(state, self._config, idle_since)
            due = min((at for at in times if at >= now), default=now + self._least_s)
            heapq.heappush(self._heap, (min(due, now + self._least_s), number, state.request.request_id))
        return found

    def _due(self, states: Mapping[str, RequestState], now: float) -> list[tuple[int, RequestState]]:
        """Requests without progress for `least_quiet_s`, off the heap, by their numbers in the order of their coming."""
        heap, found = self._heap, []
        while heap and heap[0][0] < now:
            _, number, request_id = heap[0]
            state = states.get(request_id)
            if state is None or state.done:
                heapq.heappop(heap)
            elif (due := state.progress_at + self._least_s) >= now:
                heapq.heapreplace(heap, (due, number, request_id))
            else:
                heapq.heappop(heap)
                found.append((number, state))
        return sorted(found, key=_number)


def _number(one: tuple[int, RequestState]) -> int:
    return one[0]
