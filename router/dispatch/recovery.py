"""What happens to a request when a worker fails it: the same decode worker, another place, or the end.

A stream that got further since its last move starts its count of moves anew, so it outlives any number of workers. A
request whose every worker dies before it got anywhere may be what kills them: from its second such death on it is a
suspect. Suspects are placed one at a time, so that those who were only near are cleared, and the one that is not ends
after `max_retries` moves, like every request that gets nowhere. A worker that was only silent, and comes back, has not
died of anything.
"""

from __future__ import annotations

import logging

from diptych.common.errors import FatalRequest, RequestError, Unavailable
from diptych.router.dispatch.flight import Assignment, Flight
from diptych.router.dispatch.load import DispatchCounters
from diptych.router.dispatch.placement import Placement

log = logging.getLogger(__name__)

BACKOFF_S = 0.05
MAX_BACKOFF_S = 1.0
RETRY_AFTER_S = 1.0
SUSPECT_DEATHS = 2


class Recovery:
    """Moves requests off workers that failed them. A request that it puts into `queue` waits to be placed again."""

    def __init__(
        self, max_retries: int, placement: Placement, queue: dict[str, Flight], counters: DispatchCounters
    ) -> None:
        self._max_retries, self._placement, self._queue, self._counters = max_retries, placement, queue, counters
        self._on_trial: Flight | None = None

    def recover(
        self, flight: Flight, failed: Assignment, reason: str, now: float, *, died: bool = False
    ) -> RequestError | None:
        """React to the loss of one worker, which `died` or lives on; the error that ends the request, or None."""
        decode = flight.decode
        if failed is flight.prefill and decode is not None and decode.delivered:
            self._placement.computed(failed)
            return None
        flight.moves(failed, reason, now, died=died)
        if flight.num_fruitless > self._max_retries:
            return _given_up(flight)
        self._counters.num_retries[failed.role] += 1
        log.info("request %s moves: %s", flight.request.request_id, reason)
        if failed is flight.prefill and decode is not None and self.may_be_placed(flight):
            self._placement.remove(flight, failed)
            if self._placement.replace_prefill(flight, now):
                return None
        self._placement.withdraw(flight)
        flight.attempt += 1
        self._requeue(flight, now)
        return None

    def may_be_placed(self, flight: Flight) -> bool:
        """False for a suspect while another one is on trial."""
        if flight.num_deaths < SUSPECT_DEATHS:
            return True
        other = self._on_trial
        if other is not None and other is not flight and not other.done and not other.got_further:
            return False
        self._on_trial = flight
        return True

    def _requeue(self, flight: Flight, now: float) -> None:
        """Wait to be placed: at once the first time, then ever longer, so that no request hammers a sick worker."""
        flight.queued_at = now
        if flight.num_fruitless > 1:
            flight.not_before = now + min(MAX_BACKOFF_S, BACKOFF_S * 2.0 ** (flight.num_fruitless - 2))
        self._queue[flight.request.request_id] = flight


def _given_up(flight: Flight) -> RequestError:
    number = flight.num_fruitless
    if flight.num_deaths == number > 1:
        return FatalRequest(f"{number} workers in a row died with this request; the last: {flight.last_failure}")
    return Unavailable(f"gave up after {number} attempts; the last: {flight.last_failure}", retry_after_s=RETRY_AFTER_S)
