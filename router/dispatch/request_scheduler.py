"""Places queued requests in order, and revokes prompts that wait long on a slow worker. Never blocks.

    submit ─> place? ─ no worker, or all have enough prompts ─> waiting ─ first token, tick or timer ─> placed in order

The router does not know the order of prompts inside a worker. A prompt counts as not started while the prompts placed
there before it are predicted to take long. Revoking a started prompt wastes its computation, so the gain must be large,
and each prompt is revoked rarely.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from itertools import takewhile

import msgspec

from common.config import RouterConfig
from common.errors import RETRY_AFTER_S, ModelNotFound, RequestError, Unavailable
from common.observe import REMIND_S
from common.wire import Role
from router.dispatch.admission import Admission
from router.dispatch.load import DispatchCounters
from router.dispatch.placement import Placement
from router.dispatch.recovery import Recovery
from router.dispatch.request_state import RequestState, Stage
from router.dispatch.waiting import HeldPrompts, WaitingRequests, misses_goal
from router.dispatch.waits import waits_of
from router.fleet import Worker, WorkerRegistry
from router.policy import Choice, RequestShape

LEAST_WAIT_S = 1.0
"""Prompts with a shorter remaining wait are not moved: moving costs messages, and they may have started."""
LEAST_AGE_S = 0.5
"""Prompts placed more recently are not moved, because their worker has not reported them yet."""
GAIN = 0.5
"""Maximum time on the other worker as a fraction of the time here."""
MAX_MOVES = 2
"""Maximum number of times that one prompt is revoked."""


def overdue(
    states: Iterable[RequestState], workers: Mapping[str, Worker], now: float
) -> list[tuple[RequestState, float]]:
    """Return prompts on prefill workers that wait long, with the seconds until their first token, the longest first.

    Assumes that a first token that is late already will be late by the same amount again.
    """
    found = []
    for state, later_s in waits_of(states, workers):
        if not may_move(state, now):
            continue
        waited_s = now - state.times.progress_at
        late_s = max(0.0, waited_s - state.times.expected_s) if state.times.expected_s > 0 else 0.0
        if later_s + late_s > LEAST_WAIT_S:
            found.append((state, later_s + late_s + state.forecast.prompt_s))
    return sorted(found, key=lambda one: -one[1])


def may_move(state: RequestState, now: float) -> bool:
    """Return whether an unanswered prompt on a prefill worker may be moved: not moved too often or too recently."""
    return (
        not state.done
        and state.attempts.prefill is not None
        and state.stage is Stage.PREFILL
        and not state.stream.token_ids
        and state.attempts.num_taken_back < MAX_MOVES
        and now - state.times.progress_at > LEAST_AGE_S
    )


def is_worth(here_s: float, there_s: float) -> bool:
    """Return whether moving a prompt is worthwhile."""
    return there_s < GAIN * here_s and here_s - there_s > LEAST_WAIT_S


log = logging.getLogger(__name__)

MAX_PLACED_A_TURN = 32
"""Maximum number of queued requests placed in one iteration of the event loop. Each takes almost a millisecond."""
MAX_REVOKED = 8
"""Maximum number of prompts revoked at one tick."""
NOTABLE_WAIT_S = 5.0
"""Wait without any ready worker that is logged, in seconds; or half of the maximum wait, if that is less."""
LEAST_PAUSE_S = 0.01
"""Minimum delay before the queue is served again because a worker is predicted to have capacity."""

Cancel = Callable[[], None]
Later = Callable[[float, Callable[[float], None]], Cancel]


class RequestScheduler:
    """Places and revokes requests. Uses the core's objects, on its thread."""

    def __init__(
        self,
        config: RouterConfig,
        registry: WorkerRegistry,
        waiting: WaitingRequests,
        placement: Placement,
        recovery: Recovery,
        admission: Admission,
        held_prompts: HeldPrompts,
        counters: DispatchCounters,
        later: Later,
        fail: Callable[[RequestState, RequestError], None],
    ) -> None:
        self._config, self._registry, self._waiting, self._placement = config, registry, waiting, placement
        self._recovery, self._admission, self._held, self._counters = recovery, admission, held_prompts, counters
        self._later, self._fail = later, fail
        self._cancel: Cancel | None = None
        self._serves_at = 0.0
        self._paused_until = -math.inf
        self._reminded_at = -REMIND_S

    def place_new(self, state: RequestState, now: float, chosen: tuple[Choice, RequestShape] | None) -> None:
        """Place a new request at `chosen`, unless it must wait for capacity or for earlier requests."""
        if chosen is not None and self._waiting.num_held and self._held.concerns(chosen[0]):
            self._hold(state, chosen[0], now)
            if not self._is_next(state, now):
                return
        if not self.try_place(state, now, chosen) and state.held_s is None:
            state.note(now, "waits", self._obstacle(state, now) if state.records_details else "")

    def try_place(self, state: RequestState, now: float, chosen: tuple[Choice, RequestShape] | None = None) -> bool:
        """Place the next queued request. `chosen` is the result of a `Placement.choose` just before."""
        if now < state.times.not_before or not self._recovery.claim_trial(state):
            return False
        if not state.stream.token_ids:  # an answer that has begun is never held
            chosen = chosen or self._placement.choose(state, now, held_s=self._held.others_s(state))
            if chosen is None or self._holds(state, chosen[0], now):
                return False
        admitted = state.forecast if state.held_s is not None else None
        if (choice := self._placement.place(state, now, chosen)) is None:
            return False
        if admitted is not None:  # keep the predicted wait, which includes the time in this queue
            state.forecast = msgspec.structs.replace(choice.forecast, wait_s=admitted.wait_s)
        self._admission.expect(state, choice, now)
        self._waiting.placed(state)
        kind = "prefill" if state.attempts.decode is None else "remote" if state.attempts.prefill else "local"
        self._counters.num_choices[kind] += 1
        state.note(now, "placed", kind, choice)
        return True

    def serve(self, now: float) -> None:
        """Place queued requests in order, `MAX_PLACED_A_TURN` at once. Fail those that waited too long."""
        self.close()
        if self._registry.is_paused:
            self._paused_until = now
        num_placed = 0
        full_for = full_for_late = -math.inf  # highest priorities for which no worker has capacity
        for state in self._waiting.in_order(now):
            priority, is_held = state.request.priority, state.held_s is not None
            if is_held and priority <= full_for:
                if self._waiting.num_held == len(self._waiting):
                    break  # the others are held too, and none has a higher priority
                continue
            is_late = is_held and misses_goal(state, now)
            if is_late and priority <= full_for_late:
                continue
            if self.try_place(state, now):
                num_placed += 1
                if num_placed == MAX_PLACED_A_TURN:
                    self._serve_in(0.0, now)
                    return
            elif is_late:
                full_for_late = max(full_for_late, priority)
            elif state.held_s is not None:
                full_for = max(full_for, priority)
        self._remind(now)
        most_s = self._config.queue_timeout_s
        overdue = list(takewhile(lambda one: self._waited_s(one, now) > most_s, self._waiting))
        is_starting = bool(overdue) and self._registry.is_starting("decode", now)
        for state in overdue:
            if state.request.continues and state.held_s is not None:
                continue  # workers exist, but are busy with other steps of the same answer
            if state.stream.token_ids and is_starting:
                continue  # its client has a part of the answer, so it cannot send the request elsewhere
            why = f"The request waited {now - state.times.queued_at:.1f} s for a worker: {self._obstacle(state, now)}"
            self._fail(state, Unavailable(why, retry_after_s=RETRY_AFTER_S))
        self._fail_without_adapter()

    def room_expected(self, now: float) -> None:
        """Serve the queue because a worker may have capacity for a held request."""
        if self._waiting.num_held:
            self._serve_in(0.0, now)

    def revoke_overdue(self, states: Iterable[RequestState], now: float) -> None:
        """Move prompts that would be computed much sooner on another worker. Called at each tick."""
        if len(self._registry.ready("prefill")) < 2:
            return
        for state, here_s in overdue(states, self._registry.workers, now)[:MAX_REVOKED]:
            prefill = state.attempts.prefill
            chosen = self._placement.choose(state, now, {prefill.address}) if prefill is not None else None
            if prefill is None or chosen is None or not is_worth(here_s, chosen[0].forecast.ttft_s):
                continue
            priority = state.request.priority
            if self._held.concerns(chosen[0]) and self._held.room_in_s(chosen[0], priority, now) > 0:
                continue
            state.attempts.num_taken_back += 1
            self._counters.num_taken_back += 1
            fields = {"wait_here_s": here_s, "wait_there_s": chosen[0].forecast.ttft_s}
            log.info("request %s: revoked from %s, which is slow", state.request.request_id, prefill.name, extra=fields)
            state.note(now, "revoked", f"{prefill.name} would start {here_s:.2f} s from now")
            self._placement.start_over(state)
            self._waiting.add(state, now)
            self.try_place(state, now, chosen)

    def close(self) -> None:
        """Cancel the timer."""
        cancel, self._cancel = self._cancel, None
        if cancel is not None:
            cancel()

    # ------------------------------------------------------------ inside

    def _fail_without_adapter(self) -> None:
        """Fail the requests whose adapter weights no worker can ever serve."""
        waiting = [state for state in self._waiting if state.request.adapter]
        gone = {digest for digest in {state.request.adapter for state in waiting} if self._registry.is_gone(digest)}
        for state in waiting:
            if state.request.adapter not in gone:
                continue
            if self._registry.has_adapter(name := state.request.adapter_name):  # its name has other weights now
                why = f"The adapter {name!r} was replaced while the request waited."
                self._fail(state, Unavailable(why, param="model", retry_after_s=RETRY_AFTER_S))
            else:
                self._fail(state, ModelNotFound("The adapter of this request was unloaded.", param="model"))

    def _is_next(self, state: RequestState, now: float) -> bool:
        """Return whether a held request is first in order, except for an old one of lower priority.

        An old request may stand first, but a worker without capacity for its priority can have some for higher ones.
        """
        for other in self._waiting.in_order(now):
            if other.held_s is None or other.request.priority >= state.request.priority:
                return other is state
        return False

    def _remind(self, now: float) -> None:
        """Log once a minute while requests wait because no worker is ready."""
        if now - self._reminded_at < REMIND_S or (oldest := next(iter(self._waiting), None)) is None:
            return
        role: Role = "prefill" if oldest.pools else "decode"
        waited_s, most_s = self._waited_s(oldest, now), self._config.queue_timeout_s
        if waited_s < min(NOTABLE_WAIT_S, most_s / 2) or self._registry.ready(role):
            return
        self._reminded_at = now
        log.warning(
            "%d requests wait for a worker, the longest for %.1f s, and get status 503 after %g s: %s",
            *(len(self._waiting), waited_s, most_s, self._registry.missing(role, now)),
        )

    def _waited_s(self, state: RequestState, now: float) -> float:
        """Return the wait that counts for the timeout: only a request's deadline limits its wait in a pause."""
        return now - max(state.times.queued_at, self._paused_until)

    def _holds(self, state: RequestState, choice: Choice, now: float) -> bool:
        """Return whether the request stays held, because all workers like the chosen one have enough prompts."""
        if not self._held.concerns(choice):
            return False
        is_late = misses_goal(state, now + choice.forecast.prompt_s if state.held_s is None else now)
        room_in_s = self._held.room_in_s(choice, state.request.priority, now, is_late=is_late)
        if room_in_s <= 0:
            return False
        self._hold(state, choice, now)
        self._serve_in(max(LEAST_PAUSE_S, room_in_s), now)
        return True

    def _hold(self, state: RequestState, choice: Choice, now: float) -> None:
        if state.held_s is None:
            state.forecast = choice.forecast
            state.note(now, "held", f"each prefill worker has {self._held.held_s:.2f} s of prompts queued")
        self._waiting.hold(state, choice.forecast.prompt_s)

    def _serve_in(self, pause_s: float, now: float) -> None:
        """Serve the queue after a delay, unless it is served sooner anyway."""
        if self._cancel is not None:
            if self._serves_at <= now + pause_s:
                return
            self.close()
        self._serves_at = now + pause_s
        self._cancel = self._later(pause_s, self.serve)

    def _obstacle(self, state: RequestState, now: float) -> str:
        if state.held_s is None:
            return self._placement.obstacle(state, now)
        return f"all workers are busy, and the router holds {self._waiting.held_s:.1f} s of prompts"
