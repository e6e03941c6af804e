"""What happens to a request when a worker fails it: the same decode worker, another place, or the end."""

from __future__ import annotations

import logging

from diptych.common.errors import RequestError, Unavailable
from diptych.router.dispatch.flight import Assignment, Flight
from diptych.router.dispatch.load import DispatchCounters
from diptych.router.dispatch.placement import Placement

log = logging.getLogger(__name__)

BACKOFF_S = 0.05
MAX_BACKOFF_S = 1.0


class Recovery:
    """Moves requests off workers that failed them. A request that it puts into `queue` waits to be placed again."""

    def __init__(
        self, max_retries: int, placement: Placement, queue: dict[str, Flight], counters: DispatchCounters
    ) -> None:
        self._max_retries, self._placement, self._queue, self._counters = max_retries, placement, queue, counters

    def recover(self, flight: Flight, failed: Assignment, reason: str, now: float) -> RequestError | None:
        """React to the loss of one worker; the error that ends the request, or None while there is hope."""
        decode = flight.decode
        if failed is flight.prefill and decode is not None and decode.delivered:
            self._placement.computed(failed)
            return None
        flight.num_failures += 1
        flight.last_failure = reason
        flight.failed_lives.add((failed.address, failed.epoch))
        flight.stream.drop_ahead()
        if flight.num_failures > self._max_retries:
            return Unavailable(f"gave up after {flight.num_failures} attempts; the last: {reason}", retry_after_s=1.0)
        self._counters.num_retries[failed.role] += 1
        log.info("request %s moves: %s", flight.request.request_id, reason)
        if failed is flight.prefill and decode is not None:
            self._placement.remove(flight, failed)
            if self._placement.replace_prefill(flight, now):
                return None
        self._placement.withdraw(flight)
        flight.attempt += 1
        self._requeue(flight, now)
        return None

    def _requeue(self, flight: Flight, now: float) -> None:
        """Wait to be placed: at once the first time, then ever longer, so that no request hammers a sick worker."""
        flight.queued_at = now
        if flight.num_failures > 1:
            flight.not_before = now + min(MAX_BACKOFF_S, BACKOFF_S * 2.0 ** (flight.num_failures - 2))
        self._queue[flight.request.request_id] = flight
