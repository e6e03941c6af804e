"""Starts live migrations between ready decode workers, as `router/policy/balance.py` decides.

tick ──choose_move──> hand-over ─┬─ succeeded: source and target pause for PAUSE_S
                                 └─ failed: the source pauses, with exponential backoff
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from common.errors import backoff_s
from router.dispatch.growth import num_more_blocks
from router.dispatch.handover import HandOverOrders
from router.dispatch.load import DispatchCounters
from router.dispatch.placement import Placement
from router.dispatch.request_state import RequestState, Stage
from router.fleet import Worker, WorkerRegistry
from router.policy import Running, choose_move, overload_reason

log = logging.getLogger(__name__)

PAUSE_S, MAX_PAUSE_S = 0.5, 60.0
"""Pause of a worker between two moves, and its maximum after repeated failures, in seconds."""
SETTLED_S = 10.0
"""Seconds during which a moved answer is not moved again."""


@dataclass(frozen=True, slots=True)
class _Move:
    source: str
    target: str
    attempt: int


class Balancer:
    """Moves running answers between ready decode workers. A worker takes part in at most one move at a time."""

    def __init__(
        self,
        registry: WorkerRegistry,
        placement: Placement,
        handovers: HandOverOrders,
        counters: DispatchCounters,
        *,
        least_tpot_s: float,
    ) -> None:
        """`least_tpot_s`: strictest goal for the time per output token over all classes, 0 if there is none."""
        self._registry, self._placement = registry, placement
        self._handovers, self._counters, self._least_tpot_s = handovers, counters, least_tpot_s
        self._open: dict[str, _Move] = {}
        self._rests_until: dict[str, float] = {}
        self._num_failed: dict[str, int] = {}
        self._moved_at: dict[str, float] = {}

    def tick(self, states: Mapping[str, RequestState], now: float) -> None:
        """Start the moves that are due. Called at each tick."""
        self._close(states, now)
        workers = self._registry.ready("decode")
        if len(workers) < 2:
            return
        resting = {address for address, until in self._rests_until.items() if until > now}
        busy = self._handovers.workers | resting
        by_source = self._candidates(states.values(), busy, now)
        for address, found in by_source.items():
            source = self._registry.workers[address]
            running = [self._running(state, source) for state in found]
            move = choose_move(source, workers, running, busy)
            if move is not None and self._begin(states[move.request_id], source, move.target, move.reason, now):
                busy |= {address, move.target.address}

    # ------------------------------------------------------------ inside

    def _candidates(self, states: Iterable[RequestState], busy: set[str], now: float) -> dict[str, list[RequestState]]:
        """Return the movable answers of each worker that should lose one."""
        booked = (one for one in self._registry.ready("decode") if one.bookings)  # others run nothing for this router
        leaving = [one for one in booked if one.address not in busy and overload_reason(one, self._least_tpot_s)]
        found: dict[str, list[RequestState]] = {worker.address: [] for worker in leaving}
        if not found:
            return found
        for state in states:
            decode = state.attempts.decode
            if decode is None or decode.address not in found or state.attempts.successor is not None or state.done:
                continue
            if state.stage is not Stage.DECODE or state.stream.has_gap or now < state.attempts.handover_after:
                continue
            if now - self._moved_at.get(state.request.request_id, -SETTLED_S) >= SETTLED_S:
                found[decode.address].append(state)
        return found

    def _running(self, state: RequestState, worker: Worker) -> Running:
        num_expected = self._placement.expected_more(state)
        return Running(
            state.request.request_id,
            state.num_tokens,
            worker.num_blocks_of(state.num_tokens),
            num_expected,
            num_more_blocks(worker, state.num_tokens, num_expected),
            state.request.tpot_s,
            state.request.adapter,
        )

    def _begin(self, state: RequestState, source: Worker, target: Worker, reason: str, now: float) -> bool:
        request_id = state.request.request_id
        fields = {
            "reason": reason,
            "source_spare_blocks": source.load.num_spare_blocks,
            "target_spare_blocks": target.load.num_spare_blocks,
            "tokens": state.num_tokens,
        }
        if not self._handovers.begin(state, target, now):
            return False
        self._open[request_id] = _Move(source.address, target.address, state.attempts.number)
        self._counters.num_balanced[reason] += 1
        log.info("request %s: moving from %s to %s", request_id, source.worker_id, target.worker_id, extra=fields)
        return True

    def _close(self, states: Mapping[str, RequestState], now: float) -> None:
        """Process finished moves: pause their workers."""
        for request_id, move in list(self._open.items()):
            state = states.get(request_id)
            if state is not None and state.attempts.successor is not None and state.attempts.number == move.attempt:
                continue
            del self._open[request_id]
            if state is not None and state.attempts.decode is not None and state.attempts.decode.address == move.target:
                self._moved_at[request_id] = now
            has_failed = (
                state is not None and state.attempts.decode is not None and state.attempts.decode.address == move.source
            )
            num_failed = self._num_failed.pop(move.source, 0) + 1 if has_failed else 0
            if num_failed:
                self._num_failed[move.source] = num_failed
            pause_s = backoff_s(PAUSE_S, MAX_PAUSE_S, num_failed)
            self._rests_until |= {move.source: now + pause_s, move.target: now + PAUSE_S}
        for request_id in [one for one, at in self._moved_at.items() if now - at > SETTLED_S]:
            del self._moved_at[request_id]
        for address in [one for one, until in self._rests_until.items() if until <= now - MAX_PAUSE_S]:
            del self._rests_until[address]
            self._num_failed.pop(address, None)
