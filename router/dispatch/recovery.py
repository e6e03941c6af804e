"""Recovery of requests from failed workers: same decode worker, another placement, or an error.

A request fails after `max_retries` failures without progress in between. Progress resets the count, so a long stream
survives any number of workers.

A request whose workers die before it makes progress may be the cause. After its second such death it is a suspect, and
only one suspect is placed at a time. Requests that were on a dying worker by coincidence make progress and are cleared.
A worker that was only silent and returns does not count as dead.

The replacement of a prefill worker recomputes tokens that the first one may have sent already, and may round
differently. Then the request restarts after the tokens already sent. This does not count as a failure.
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
    backoff_s,
)
from common.wire.messages import RequestFailed
from router.dispatch.load import DispatchCounters
from router.dispatch.placement import Placement
from router.dispatch.request_state import Assignment, RequestState
from router.dispatch.waiting import WaitingRequests

log = logging.getLogger(__name__)

BACKOFF_S, MAX_BACKOFF_S = 0.05, 1.0
"""Initial delay of the third placement without progress, which doubles up to the second value, in seconds."""
SUSPECT_DEATHS = 2
"""Number of workers that died with a request, without progress, before the request becomes a suspect."""
DEADLINE_SLACK_S = 0.1
"""A worker may detect an exceeded deadline this much earlier than the router, in seconds."""


class Recovery:
    """Moves requests off failed workers. Requests added to `waiting` are placed again."""

    def __init__(
        self, max_retries: int, placement: Placement, waiting: WaitingRequests, counters: DispatchCounters
    ) -> None:
        self._max_retries, self._placement, self._waiting, self._counters = max_retries, placement, waiting, counters
        self._on_trial: RequestState | None = None

    def recover(
        self, state: RequestState, failed: Assignment, reason: str, now: float, *, died: bool = False
    ) -> RequestError | None:
        """Continue without a worker that failed, or `died`. Returns the error that ends the request, or None."""
        decode = state.attempts.decode
        if state.attempts.is_through_with(failed):
            self._placement.computed(failed, now)
            return None
        state.record_failure(failed, reason, now, died=died)
        if state.attempts.num_fruitless > self._max_retries:
            return _given_up(state)
        self._counters.num_retries[failed.role] += 1
        log.info("request %s: retrying: %s", state.request.request_id, reason)
        if failed is state.attempts.prefill and decode is not None and self.claim_trial(state):
            self._placement.remove(state, failed)
            if self._placement.replace_prefill(state, now):
                prefill = state.attempts.prefill
                state.note(now, "replaced", prefill.name if prefill is not None else decode.name)
                return None
        self._requeue(state, now)
        return None

    def continue_behind(self, state: RequestState, differing: Assignment, now: float) -> None:
        """Restart after the tokens already sent, because healthy workers disagree. Not a failure."""
        if state.attempts.is_through_with(differing):
            self._placement.computed(differing, now)
            return
        state.note(now, "restarted", f"{differing.name} computed other tokens than those already sent")
        self._requeue(state, now)

    def claim_trial(self, state: RequestState) -> bool:
        """Return whether the request may be placed. False for a suspect while another one is on trial."""
        if state.attempts.num_deaths < SUSPECT_DEATHS:
            return True
        other = self._on_trial
        if other is not None and other is not state and not other.done and not other.attempts.got_further:
            return False
        self._on_trial = state
        return True

    def _requeue(self, state: RequestState, now: float) -> None:
        """Queue the request again, immediately the first time, then with exponential backoff."""
        self._placement.start_over(state)
        state.stream.drop_ahead()
        if state.attempts.num_fruitless > 1:
            state.times.not_before = now + backoff_s(BACKOFF_S, MAX_BACKOFF_S, state.attempts.num_fruitless - 2)
        self._waiting.add(state, now)


def _given_up(state: RequestState) -> RequestError:
    number = state.attempts.num_fruitless
    if state.attempts.num_deaths == number > 1:
        log.error(
            "request %s: ended with status 400: its last %d workers died: %s. If it is sent again, limit its key",
            *(state.request.request_id, number, ", ".join(state.attempts.dead_workers)),
            extra={"key": state.request.key or "none", "prompt": len(state.request.prompt_token_ids)},
        )
        return FatalRequest(
            f"The last {number} workers that ran this request died. Last failure: {state.attempts.last_failure}"
        )
    return Unavailable(
        f"Gave up after {number} attempts; last failure: {state.attempts.last_failure}", retry_after_s=RETRY_AFTER_S
    )


def refusal(failed: RequestFailed, reason: str, remaining_s: float) -> RequestError:
    """Return the error for a failure that would repeat on any other worker.

    A rejection before any computation is the client's fault, and never a 5xx, which clients would retry.
    """
    if remaining_s < DEADLINE_SLACK_S:
        return DeadlineExceeded(reason)
    return InvalidRequest(failed.message) if failed.phase in ("queue", "grammar", "sampling") else InternalError(reason)
