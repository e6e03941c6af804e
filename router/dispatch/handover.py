"""Moves running streams between decode workers by live hand-over, and all other requests off draining ones.

    begin ──> the old worker decodes on and copies its KV to the new one ──"moved", or the new one's first token──> done
      └── either side fails, or it takes too long ──> the old worker goes on; another try a little later

The router takes tokens from the old worker until then, and from the new one afterwards, which repeats the last ones.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from router.dispatch.load import DispatchCounters
from router.dispatch.placement import Placement
from router.dispatch.request_state import RequestState
from router.dispatch.waiting import WaitingRequests
from router.fleet import Worker, WorkerRegistry

log = logging.getLogger(__name__)

MAX_PER_TARGET = 8
"""Hand-overs to one worker at once; their copies share its wire and its host."""
RESERVED_TOKENS = 128
"""Tokens that the old worker may generate while it copies; the new one sets blocks aside for them."""
TIMEOUT_S = 15.0
"""Ends a hand-over of which neither worker reports; longer than their own deadline."""
RETRY_HANDOVER_S = 0.5
"""How long after a failed hand-over the next one may begin."""


class HandOverOrders:
    """Gives workers the orders for hand-overs, and follows them.

    Requests that start over go into `waiting`, as after a failure, but do not count as failed.
    """

    def __init__(
        self, registry: WorkerRegistry, placement: Placement, waiting: WaitingRequests, counters: DispatchCounters
    ) -> None:
        self._registry, self._placement, self._waiting, self._counters = registry, placement, waiting, counters
        self._open: dict[str, RequestState] = {}

    def leave(self, states: Iterable[RequestState], now: float) -> None:
        """Take requests off draining workers as far as others have room; at each tick, and when a hand-over ends."""
        self._expire(now)
        targets, draining = self._registry.ready("decode"), self._registry.draining
        if not draining or not targets:
            return
        for state in list(states):
            decode = state.attempts.decode
            if state.done or decode is None or decode.address not in draining or state.attempts.successor is not None:
                continue
            if not decode.delivered:
                if self._placement.candidates.usable("decode", state):  # else the draining worker serves it to its end
                    self._place_again(state, now)
            elif now >= state.attempts.handover_after and not state.stream.has_gap:
                self._begin(state, targets, now)

    def begin(self, state: RequestState, target: Worker, now: float) -> bool:
        """Hand a running answer over to `target`. False when a worker takes no messages: it stays where it is."""
        self._open[state.request.request_id] = state
        state.attempts.handover_until = now + TIMEOUT_S
        if self._placement.hand_over(state, target, _num_reserved(state), now):
            return True
        self.fail(state, "a worker takes no messages", now)
        return False

    @property
    def workers(self) -> set[str]:
        """Addresses of those that take part in a hand-over under way."""
        parts = ((state.attempts.decode, state.attempts.successor) for state in self._open.values())
        return {one.address for pair in parts for one in pair if one is not None}

    def succeed(self, state: RequestState, now: float, *, moved: bool) -> None:
        """The new worker goes on. `moved`: the old one reported that the new one has all KV, and ended the request.

        Without that report the router aborts the request on the old worker.
        """
        before, successor = state.succeed(now)
        if moved:
            self._placement.remember(state, successor, now)
        self._placement.leave(state, before, abort=not moved)
        self._close(state, "done")

    def fail(self, state: RequestState, reason: str, now: float) -> None:
        """Leave the request with the old worker, and abort it on the new one."""
        successor, state.attempts.successor = state.attempts.successor, None
        if successor is not None:
            self._placement.leave(state, successor, abort=True)
        state.attempts.handover_after = now + RETRY_HANDOVER_S
        self._close(state, "failed")
        log.info("request %s is not handed over: %s", state.request.request_id, reason)

    # ------------------------------------------------------------ inside

    def _begin(self, state: RequestState, targets: Sequence[Worker], now: float) -> None:
        source = self._registry.workers[state.attempts.decode.address] if state.attempts.decode else None
        if source is None:
            return
        num_reserved = _num_reserved(state)
        num_tokens, num_left = state.num_tokens + num_reserved, state.num_remaining - num_reserved
        busy = Counter(open_.attempts.successor.address for open_ in self._open.values() if open_.attempts.successor)
        if adapter := state.request.adapter:
            targets = [worker for worker in targets if adapter in worker.load.digests]
        target = choose_target(targets, source, num_tokens=num_tokens, num_left=num_left, busy=busy)
        if target is not None:
            self.begin(state, target, now)

    def _place_again(self, state: RequestState, now: float) -> None:
        """No token came from the decode worker yet: starting over elsewhere costs no token."""
        self._placement.start_over(state)
        self._waiting.add(state, now)

    def _expire(self, now: float) -> None:
        for state in list(self._open.values()):
            if state.done or state.attempts.successor is None:  # the answer ended, or its old worker was lost
                self._close(state, "ended")
            elif now > state.attempts.handover_until:
                self.fail(state, f"no worker reported for {TIMEOUT_S:g} s", now)

    def _close(self, state: RequestState, outcome: str) -> None:
        if self._open.pop(state.request.request_id, None) is not None:
            self._counters.num_handovers[outcome] += 1


def _num_reserved(state: RequestState) -> int:
    """How many tokens the old worker may generate during the hand-over."""
    return min(RESERVED_TOKENS, state.num_remaining)


def choose_target(
    workers: Sequence[Worker], source: Worker, *, num_tokens: int, num_left: int = 0, busy: Mapping[str, int]
) -> Worker | None:
    """The best worker for a sequence of `num_tokens` on `source`; None when none has room for it now.

    The sequence may grow by `num_left` tokens. `busy`: hand-overs under way, by the target's address.
    """

    def fits(worker: Worker) -> bool:
        hello = worker.identity
        return (
            hello.fingerprint == source.identity.fingerprint
            and busy.get(worker.address, 0) < MAX_PER_TARGET
            and not worker.life.suspect
            and worker.load.num_requests < max(1, hello.max_num_seqs)
            and num_tokens <= worker.max_tokens
            and worker.num_blocks_of(num_tokens) <= worker.load.num_available_blocks
        )

    def cost(worker: Worker) -> tuple[bool, int, int, int, int, str]:
        crowd = worker.load.num_requests + busy.get(worker.address, 0)
        cuts = num_tokens + num_left > worker.max_tokens
        return (
            cuts,
            crowd,
            worker.load.num_queued_tokens,
            -worker.load.num_available_blocks,
            worker.bookings.num_dispatched,
            worker.address,
        )

    return min((worker for worker in workers if fits(worker)), key=cost, default=None)
