"""Which workers serve a request. Pure: worker state and the request go in, a choice comes out; no clock, no chance.

Costs are prompt tokens that must be computed first. Equal costs go to the worker with fewer requests, then to the one
that got fewer so far, so equal workers take turns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from router.fleet.registry import by_fingerprint
from router.fleet.worker import Worker

OUTPUT_RESERVE = 256
"""Output tokens that a decode worker should have room for; how many will come is unknown."""
OVERFLOW_WEIGHT = 4
"""Requests that one beyond `max_num_seqs` weighs besides itself: it waits until a whole other request has ended."""


@dataclass(frozen=True, slots=True)
class RequestShape:
    """What the policy weighs of a request. `hits`: prompt tokens that a worker has cached, by its address.

    `alone`: the worker that computes the prompt also makes the whole answer.
    """

    num_tokens: int
    num_remaining: int
    hits: Mapping[str, int]
    alone: bool = False

    def uncached(self, worker: Worker) -> int:
        """Prompt tokens that the worker must compute: at least the last one, whose logits are needed."""
        return max(1, self.num_tokens - self.hits.get(worker.address, 0))


@dataclass(frozen=True, slots=True)
class Choice:
    """Without `prefill` the decode worker prefills itself; without `decode` the answer has one token."""

    prefill: Worker | None
    decode: Worker | None

    @property
    def local(self) -> bool:
        return self.prefill is None


@dataclass(frozen=True, slots=True)
class RoutingPolicy:
    """Weighs prefix hits against load.

    `request_cost` is the weight, in tokens, of one more request on a decode worker. A prefix hit there is worth at most
    `max_hit_requests` requests: beyond that an idle worker wins, so one shared prompt never pins all traffic. On
    prefill workers a hit counts in full, in the unit of the queue.
    """

    local_prefill_threshold: int = 64
    request_cost: int = 64
    max_hit_requests: int = 4

    def choose(self, prefill: Sequence[Worker], decode: Sequence[Worker], shape: RequestShape) -> Choice | None:
        """Workers for a new request, out of ready ones; None when none can take it."""
        if shape.num_remaining == 1 and prefill:
            return Choice(self._best_prefill(prefill, shape), None)
        if not decode:
            return None
        chosen = min(decode, key=lambda worker: self._decode_cost(worker, shape))
        return Choice(self.choose_prefill(prefill, chosen, shape), chosen)

    def choose_prefill(self, prefill: Sequence[Worker], decode: Worker, shape: RequestShape) -> Worker | None:
        """The prefill worker for a request on `decode`; None when `decode` should prefill itself."""
        if shape.alone:
            return None
        partners = by_fingerprint(prefill).get(decode.identity.fingerprint)
        if not partners or shape.uncached(decode) <= self.local_prefill_threshold:
            return None
        return self._best_prefill(partners, shape)

    def _best_prefill(self, workers: Sequence[Worker], shape: RequestShape) -> Worker:
        def cost(worker: Worker) -> tuple[bool, int, int, int, str]:
            tokens = worker.num_queued_tokens + shape.uncached(worker)
            return (worker.suspect, tokens, worker.num_requests, worker.num_dispatched, worker.address)

        return min(workers, key=cost)

    def _decode_cost(self, worker: Worker, shape: RequestShape) -> tuple[bool, bool, bool, int, int, int, str]:
        cuts = shape.num_tokens + shape.num_remaining > worker.max_tokens  # an answer of full length
        num_requests = worker.num_requests
        overflow = max(0, num_requests + 1 - max(1, worker.identity.max_num_seqs))
        hit = min(shape.num_tokens - shape.uncached(worker), self.max_hit_requests * self.request_cost)
        reserve = min(shape.num_remaining, OUTPUT_RESERVE)
        lacks_room = worker.num_blocks_of(shape.uncached(worker) + reserve) > worker.num_available_blocks
        crowd = num_requests + OVERFLOW_WEIGHT * overflow
        cost = worker.num_queued_tokens + self.request_cost * crowd - hit
        return (cuts, worker.suspect, lacks_room, cost, num_requests, worker.num_dispatched, worker.address)
