"""Places waiting requests in turn, and revokes prompts that wait long at a slow worker.

    submit ─> place? ─ no worker, or all have prompts enough ─> waiting ─ a first token came, a tick, a timer ─> in turn

Nothing here waits: `later` is a timer, and `fail` ends a request.

The router does not know the order inside a worker. A prompt counts as not begun while the prompts that were placed
there before it take long. A wrong move costs what was computed of it, so a gain must be large, and each prompt is
revoked rarely.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping

import msgspec

from common.config import RouterConfig
from common.errors import RETRY_AFTER_S, ModelNotFound, RequestError, Unavailable
from router.dispatch.admission import Admission
from router.dispatch.load import DispatchCounters
from router.dispatch.placement import Placement
from router.dispatch.recovery import Recovery
from router.dispatch.request_state import RequestState, Stage
from router.dispatch.waiting import Holding, WaitingRequests
from router.dispatch.waits import waits_of
from router.fleet import Worker, WorkerRegistry
from router.policy import Choice, RequestShape

LEAST_WAIT_S = 1.0
"""A prompt whose turn comes sooner stays: to move it costs messages, and it may have begun."""
LEAST_AGE_S = 0.5
"""A prompt that was placed so recently stays: its worker has not reported on it."""
GAIN = 0.5
"""Elsewhere a prompt must take at most this share of the time that it takes here."""
MAX_MOVES = 2
"""How often one prompt is taken back at most."""


def overdue(
    states: Iterable[RequestState], workers: Mapping[str, Worker], now: float
) -> list[tuple[RequestState, float]]:
    """Prompts on prefill workers that wait long, with the seconds until their first tokens there; the longest first.

    By how much a first token is late already, it will be late again.
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
    """Whether nothing has come of a prompt on a prefill worker, and it was not moved often or just now."""
    return (
        not state.done
        and state.attempts.prefill is not None
        and state.stage is Stage.PREFILL
        and not state.stream.token_ids
        and state.attempts.num_taken_back < MAX_MOVES
        and now - state.times.progress_at > LEAST_AGE_S
    )


def is_worth(here_s: float, there_s: float) -> bool:
    """Whether a prompt should move."""
    return there_s < GAIN * here_s and here_s - there_s > LEAST_WAIT_S


log = logging.getLogger(__name__)

MAX_PLACED_A_TURN = 32
"""Requests of the queue that are placed in one turn of the event loop: each takes most of a millisecond."""
MAX_TAKEN_BACK = 8
"""Prompts that are taken back at one tick."""
LEAST_PAUSE_S = 0.01
"""The shortest pause before the queue is served again because a worker is predicted to have room."""

Cancel = Callable[[], None]
Later = Callable[[float, Callable[[float], None]], Cancel]


class Turns:
    """Owned by the core, as all that it is given."""

    def __init__(
        self,
        config: RouterConfig,
        registry: WorkerRegistry,
        waiting: WaitingRequests,
        placement: Placement,
        recovery: Recovery,
        admission: Admission,
        holding: Holding,
        counters: DispatchCounters,
        later: Later,
        fail: Callable[[RequestState, RequestError], None],
    ) -> None:
        self._config, self._registry, self._waiting, self._placement = config, registry, waiting, placement
        self._recovery, self._admission, self._holding, self._counters = recovery, admission, holding, counters
        self._later, self._fail = later, fail
        self._cancel: Cancel | None = None
        self._serves_at = 0.0

    def place_new(self, state: RequestState, now: float, chosen: tuple[Choice, RequestShape] | None) -> None:
        """Place a new request where `chosen` says, unless it must wait: for room, or for those that wait already."""
        if chosen is not None and self._waiting.num_held and self._holding.concerns(chosen[0]):
            self._hold(state, chosen[0])
            if next(self._waiting.in_turn(now)) is not state:
                return
        self.try_place(state, now, chosen)

    def try_place(self, state: RequestState, now: float, chosen: tuple[Choice, RequestShape] | None = None) -> bool:
        """Place a waiting request whose turn it is. `chosen` is what `Placement.choose` has just said."""
        if now < state.times.not_before or not self._recovery.claim_trial(state):
            return False
        if not state.stream.token_ids:  # else its client reads already
            held_s = max(0.0, self._holding.held_s - (state.held_s or 0.0))
            chosen = chosen or self._placement.choose(state, now, held_s=held_s)
            if chosen is None or self._holds(state, chosen[0], now):
                return False
        admitted = state.forecast if state.held_s is not None else None
        if (choice := self._placement.place(state, now, chosen)) is None:
            return False
        if admitted is not None:  # the wait that was predicted for it, of which a part was here
            state.forecast = msgspec.structs.replace(choice.forecast, wait_s=admitted.wait_s)
        self._admission.expect(state, choice, now)
        self._waiting.placed(state)
        kind = "prefill" if state.attempts.decode is None else "remote" if state.attempts.prefill else "local"
        self._counters.num_choices[kind] += 1
        return True

    def serve(self, now: float) -> None:
        """Place waiting requests in turn, `MAX_PLACED_A_TURN` at once; fail those that waited too long."""
        self.close()
        num_placed, is_full = 0, False
        for state in self._waiting.in_turn(now):
            if is_full and self._waiting.num_held == len(self._waiting):
                break
            if is_full and state.held_s is not None:
                continue
            if self.try_place(state, now):
                num_placed += 1
                if num_placed == MAX_PLACED_A_TURN:
                    self._serve_in(0.0, now)
                    return
            else:
                is_full |= state.held_s is not None
        for state in self._waiting:
            if now - state.times.queued_at <= self._config.queue_timeout_s:
                break
            if state.request.continues and state.held_s is not None:
                continue  # workers exist, but are busy with its siblings
            waited = f"waited {now - state.times.queued_at:.1f} s for a worker: {self._obstacle(state, now)}"
            self._fail(state, Unavailable(waited, retry_after_s=RETRY_AFTER_S))
        for state in [one for one in self._waiting if one.request.adapter]:
            if self._registry.is_gone(state.request.adapter):  # no worker will ever take it
                self._fail(state, ModelNotFound("the adapter that the request uses was unloaded", param="model"))

    def room_expected(self, now: float) -> None:
        """A worker may have room for a held request."""
        if self._waiting.num_held:
            self._serve_in(0.0, now)

    def take_back(self, states: Iterable[RequestState], now: float) -> None:
        """Place prompts anew that would be computed much sooner elsewhere; at each tick."""
        if len(self._registry.ready("prefill")) < 2:
            return
        for state, here_s in overdue(states, self._registry.workers, now)[:MAX_TAKEN_BACK]:
            prefill = state.attempts.prefill
            chosen = self._placement.choose(state, now, {prefill.address}) if prefill is not None else None
            if prefill is None or chosen is None or not is_worth(here_s, chosen[0].forecast.ttft_s):
                continue
            priority = state.request.priority
            if self._holding.concerns(chosen[0]) and self._holding.room_in_s(chosen[0], priority, now) > 0:
                continue
            state.attempts.num_taken_back += 1
            self._counters.num_taken_back += 1
            told = {"wait_here_s": here_s, "wait_there_s": chosen[0].forecast.ttft_s}
            log.info("request %s is taken back from %s", state.request.request_id, prefill.name, extra=told)
            self._placement.start_over(state)
            self._waiting.add(state, now)
            self.try_place(state, now, chosen)

    def close(self) -> None:
        """End the timer."""
        cancel, self._cancel = self._cancel, None
        if cancel is not None:
            cancel()

    # ------------------------------------------------------------ inside

    def _holds(self, state: RequestState, choice: Choice, now: float) -> bool:
        """Whether the request waits on, because all workers like the chosen one have prompts enough."""
        if not self._holding.concerns(choice):
            return False
        room_in_s = self._holding.room_in_s(choice, state.request.priority, now)
        if room_in_s <= 0:
            return False
        self._hold(state, choice)
        self._serve_in(max(LEAST_PAUSE_S, room_in_s), now)
        return True

    def _hold(self, state: RequestState, choice: Choice) -> None:
        if state.held_s is None:
            state.forecast = choice.forecast
        self._waiting.hold(state, choice.forecast.prompt_s)

    def _serve_in(self, pause_s: float, now: float) -> None:
        """Serve the queue after a pause, unless it is served sooner anyway."""
        if self._cancel is not None:
            if self._serves_at <= now + pause_s:
                return
            self.close()
        self._serves_at = now + pause_s
        self._cancel = self._later(pause_s, self.serve)

    def _obstacle(self, state: RequestState, now: float) -> str:
        if state.held_s is None:
            return self._placement.obstacle(state, now)
        return f"all have prompts to compute, and the router has {self._waiting.held_s:.1f} s of prompts in all"
