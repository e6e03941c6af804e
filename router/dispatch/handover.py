"""Moves running streams between decode workers by live migration, and drains workers.

    begin ──> the source decodes on and copies its KV to the target ──"moved", or the target's first token──> done
      └── either side fails, or the timeout passes ──> the source continues; retry after RETRY_HANDOVER_S

Until the hand-over completes, tokens are taken from the source. Afterwards they are taken from the target, which
repeats the last ones.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter

from router.dispatch.load import DispatchCounters
from router.dispatch.placement import Placement
from router.dispatch.request_state import RequestState
from router.dispatch.waiting import WaitingRequests
from router.fleet import Worker, WorkerRegistry

log = logging.getLogger(__name__)

MAX_PER_TARGET = 8
"""Maximum concurrent hand-overs to one worker, which share its network link and host."""
RESERVED_TOKENS = 128
"""Tokens that the source may generate during the copy. The target reserves blocks for them."""
TIMEOUT_S = 15.0
"""Timeout of a hand-over about which neither worker reports, in seconds. Longer than the workers' own deadline."""
RETRY_HANDOVER_S = 0.5
"""Delay before the next attempt after a failed hand-over, in seconds."""


class HandOverOrders:
    """Orders hand-overs from workers and tracks them.

    Requests that start over are added to `waiting`, but do not count as failed.
    """

    def __init__(
        self, registry: WorkerRegistry, placement: Placement, waiting: WaitingRequests, counters: DispatchCounters
    ) -> None:
        self._registry, self._placement, self._waiting, self._counters = registry, placement, waiting, counters
        self._open: dict[str, RequestState] = {}

    def leave(self, states: Iterable[RequestState], now: float) -> None:
        """Move requests off draining workers, as far as others have capacity, those with the fewest tokens first.

        Called at each tick, after each hand-over and for the tokens of draining workers.
        """
        self._expire(now)
        targets, draining = self._registry.ready("decode"), self._registry.draining
        if not draining or not targets:
            return
        due: list[tuple[int, RequestState, Worker]] = []
        for state in list(states):
            decode = state.attempts.decode
            if state.done or decode is None or decode.address not in draining or state.attempts.successor is not None:
                continue
            if not decode.delivered:
                if self._placement.candidates.usable("decode", state):  # else the draining worker completes it
                    self._place_again(state, now)
            elif now >= state.attempts.handover_after and not state.stream.has_gap:
                source = self._registry.workers[decode.address]
                due.append((state.num_tokens + _num_reserved(state), state, source))
        full: set[tuple[str, str]] = set()  # layouts and adapters for which no target has capacity
        for num_tokens, state, source in sorted(due, key=itemgetter(0)):
            kind = source.identity.fingerprint, state.request.adapter
            if kind in full:
                continue
            if (target := self._target(state, source, targets, num_tokens)) is None:
                full.add(kind)  # the others have more tokens
            else:
                self.begin(state, target, now)

    def begin(self, state: RequestState, target: Worker, now: float) -> bool:
        """Start the hand-over of a running answer to `target`. Return False if a worker cannot receive messages now."""
        self._open[state.request.request_id] = state
        state.attempts.handover_until = now + TIMEOUT_S
        if self._placement.hand_over(state, target, _num_reserved(state), now):
            return True
        self.fail(state, "a worker cannot receive messages", now)
        return False

    @property
    def workers(self) -> set[str]:
        """Addresses of workers that take part in a hand-over."""
        parts = ((state.attempts.decode, state.attempts.successor) for state in self._open.values())
        return {one.address for pair in parts for one in pair if one is not None}

    def succeed(self, state: RequestState, now: float, *, moved: bool) -> None:
        """Switch to the target.

        With `moved`, the source has reported that the target has all KV, and ended the request.

        Without that report, the router aborts the request on the source.
        """
        before, successor = state.succeed(now)
        state.note(now, "moved", f"from {before.name} to {successor.name}")
        if moved:
            self._placement.remember(state, successor, now)
        self._placement.leave(state, before, abort=not moved)
        self._close(state, "done")

    def fail(self, state: RequestState, reason: str, now: float) -> None:
        """Cancel a hand-over: the request stays on the source and is aborted on the target."""
        successor, state.attempts.successor = state.attempts.successor, None
        if successor is not None:
            self._placement.leave(state, successor, abort=True)
        state.attempts.handover_after = now + RETRY_HANDOVER_S
        state.note(now, "stayed", reason)
        self._close(state, "failed")
        log.info("request %s: not handed over: %s", state.request.request_id, reason)

    # ------------------------------------------------------------ inside

    def _target(self, state: RequestState, source: Worker, targets: Sequence[Worker], num_tokens: int) -> Worker | None:
        """Return the best target for a stream that needs blocks for `num_tokens` tokens."""
        num_left = state.num_remaining - _num_reserved(state)
        busy = Counter(open_.attempts.successor.address for open_ in self._open.values() if open_.attempts.successor)
        if adapter := state.request.adapter:
            targets = [worker for worker in targets if adapter in worker.load.digests]
        return choose_target(targets, source, num_tokens=num_tokens, num_left=num_left, busy=busy)

    def _place_again(self, state: RequestState, now: float) -> None:
        """Start over on another worker. The decode worker has sent no token yet, so no token is lost."""
        self._placement.start_over(state)
        self._waiting.add(state, now)

    def _expire(self, now: float) -> None:
        for state in list(self._open.values()):
            if state.done or state.attempts.successor is None:  # the answer ended, or the source was lost
                self._close(state, "ended")
            elif now > state.attempts.handover_until:
                self.fail(state, f"no worker reported for {TIMEOUT_S:g} s", now)

    def _close(self, state: RequestState, outcome: str) -> None:
        if self._open.pop(state.request.request_id, None) is not None:
            self._counters.num_handovers[outcome] += 1


def _num_reserved(state: RequestState) -> int:
    """Return the number of tokens that the source may generate during the hand-over."""
    return min(RESERVED_TOKENS, state.num_remaining)


def choose_target(
    workers: Sequence[Worker], source: Worker, *, num_tokens: int, num_left: int = 0, busy: Mapping[str, int]
) -> Worker | None:
    """Return the best target for a sequence of `num_tokens` tokens on `source`, or None if no worker has capacity.

    The sequence may grow by `num_left` tokens. `busy` is the number of active hand-overs by target address.
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
