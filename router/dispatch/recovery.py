"""What happens to a request when a worker fails it: the same decode worker, another place, or the end.

A request ends after `max_retries` failures without progress in between; progress resets the count, so a long stream
outlives any number of workers.

A request whose workers die before it makes progress may be what kills them. From its second such death on it is a
suspect, and suspects are placed one at a time: those that were only near a death make progress and are cleared. A
worker that was only silent, and comes back, does not count as dead.

The replacement of a prefill worker computes again what the first one may have sent already, and may round differently.
Then the request starts over behind the tokens that were sent. No worker is at fault, so this counts as no failure.
"""

from __future__ import annotations

import logging

from common.errors import (
    RETRY_AFTER_S,
    DeadlineExceeded,
    FatalRequest,
    InternalError,
    InvalidRequest,
    RequestError,
    Unavailable,
)
from common.wire.messages import RequestFailed
from router.dispatch.load import DispatchCounters
from router.dispatch.placement import Placement
from router.dispatch.request_state import Assignment, RequestState
from router.dispatch.waiting import WaitingRequests

log = logging.getLogger(__name__)

BACKOFF_S, MAX_BACKOFF_S = 0.05, 1.0
"""The wait before the third placement without progress, which doubles up to the second number."""
SUSPECT_DEATHS = 2
"""Workers that died with a request, without progress, before it may be the cause."""
DEADLINE_SLACK_S = 0.1
"""A worker may see the end of a deadline this much earlier than the router."""


class Recovery:
    """Moves requests off workers that failed them. A request that it puts into `waiting` is placed again."""

    def __init__(
        self, max_retries: int, placement: Placement, waiting: WaitingRequests, counters: DispatchCounters
    ) -> None:
        self._max_retries, self._placement, self._waiting, self._counters = max_retries, placement, waiting, counters
        self._on_trial: RequestState | None = None

    def recover(
        self, state: RequestState, failed: Assignment, reason: str, now: float, *, died: bool = False
    ) -> RequestError | None:
        """Go on without a worker that failed, or `died`. Returns the error that ends the request, or None."""
        decode = state.attempts.decode
        if state.attempts.is_through_with(failed):
            self._placement.computed(failed, now)
            return None
        state.record_failure(failed, reason, now, died=died)
        if state.attempts.num_fruitless > self._max_retries:
            return _given_up(state)
        self._counters.num_retries[failed.role] += 1
        log.info("request %s moves: %s", state.request.request_id, reason)
        if failed is state.attempts.prefill and decode is not None and self.claim_trial(state):
            self._placement.remove(state, failed)
            if self._placement.replace_prefill(state, now):
                return None
        self._requeue(state, now)
        return None

    def continue_behind(self, state: RequestState, differing: Assignment, now: float) -> None:
        """Sound workers disagree: the tokens that were sent become part of the prompt of a new attempt."""
        if state.attempts.is_through_with(differing):
            self._placement.computed(differing, now)
            return
        self._requeue(state, now)

    def claim_trial(self, state: RequestState) -> bool:
        """Let a request be placed: a suspect goes on trial. False for a suspect while another one is on trial."""
        if state.attempts.num_deaths < SUSPECT_DEATHS:
            return True
        other = self._on_trial
        if other is not None and other is not state and not other.done and not other.attempts.got_further:
            return False
        self._on_trial = state
        return True

    def _requeue(self, state: RequestState, now: float) -> None:
        """Queue the request again: at once the first time, then with a growing delay, to spare a sick worker."""
        self._placement.start_over(state)
        state.stream.drop_ahead()
        if state.attempts.num_fruitless > 1:
            state.times.not_before = now + min(MAX_BACKOFF_S, BACKOFF_S * 2.0 ** (state.attempts.num_fruitless - 2))
        self._waiting.add(state, now)


def _given_up(state: RequestState) -> RequestError:
    number = state.attempts.num_fruitless
    if state.attempts.num_deaths == number > 1:
        return FatalRequest(
            f"{number} workers in a row died with this request; the last: {state.attempts.last_failure}"
        )
    return Unavailable(
        f"gave up after {number} attempts; the last: {state.attempts.last_failure}", retry_after_s=RETRY_AFTER_S
    )


def refusal(failed: RequestFailed, reason: str, remaining_s: float) -> RequestError:
    """The error of a failure that would repeat on any other worker.

    A refusal before any computing is the request's own fault, and never a 5xx, which clients would retry.
    """
    if remaining_s < DEADLINE_SLACK_S:
        return DeadlineExceeded(reason)
    return InvalidRequest(failed.message) if failed.phase in ("queue", "grammar", "sampling") else InternalError(reason)
