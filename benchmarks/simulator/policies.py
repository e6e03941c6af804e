"""Policies to compare with, by name. They choose; forecasts, admission and all else stay production's.

Each sends prompts of more than `local_prefill_threshold` tokens to a prefill worker, and chooses among all workers. A
scenario whose workers report nothing of their steps leaves nothing to predict: then nothing else of Diptych is left.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from router.fleet.worker import Worker
from router.policy.forecast import computed_there, joined, on_decode, on_prefill
from router.policy.request_shape import RequestShape
from router.policy.routing import Choice, RoutingPolicy


@dataclass(frozen=True, slots=True)
class PlainPolicy(RoutingPolicy, ABC):
    """A rule that looks at one pool at a time."""

    @property
    def weighs_all(self) -> bool:
        return True

    @abstractmethod
    def pick(self, workers: Sequence[Worker], shape: RequestShape) -> Worker:
        """The worker of a pool for a request; `workers` is not empty."""

    def choose(
        self, prefill: Sequence[Worker], decode: Sequence[Worker], shape: RequestShape, now: float
    ) -> Choice | None:
        if shape.num_remaining == 1 and prefill:
            first = self.pick(prefill, shape)
            return Choice(first, None, on_prefill(first, shape, now))
        return self.choose_prefill(prefill, self.pick(decode, shape), shape, now) if decode else None

    def choose_prefill(self, prefill: Sequence[Worker], decode: Worker, shape: RequestShape, now: float) -> Choice:
        if shape.alone or not prefill or shape.uncached(decode) <= self.local_prefill_threshold:
            return Choice(None, decode, computed_there(decode, shape, on_decode(decode, shape), now))
        first = self.pick(prefill, shape)
        forecast = joined(on_prefill(first, shape, now), on_decode(decode, shape))
        return Choice(first, decode, forecast)


@dataclass(frozen=True, slots=True)
class Random(PlainPolicy):
    source: random.Random = field(default_factory=random.Random)

    def pick(self, workers: Sequence[Worker], shape: RequestShape) -> Worker:
        return self.source.choice(workers)


@dataclass(frozen=True, slots=True)
class RoundRobin(PlainPolicy):
    def pick(self, workers: Sequence[Worker], shape: RequestShape) -> Worker:
        return min(workers, key=lambda worker: (worker.num_dispatched, worker.address))


@dataclass(frozen=True, slots=True)
class LeastLoaded(PlainPolicy):
    """The fewest requests, as reported and booked."""

    def pick(self, workers: Sequence[Worker], shape: RequestShape) -> Worker:
        return min(workers, key=lambda worker: (worker.num_requests, worker.num_dispatched, worker.address))


@dataclass(frozen=True, slots=True)
class PrefixOnly(PlainPolicy):
    """The most tokens in the prefix cache, whatever the load; in turn among equals."""

    def pick(self, workers: Sequence[Worker], shape: RequestShape) -> Worker:
        return min(workers, key=lambda worker: (shape.uncached(worker), worker.num_dispatched, worker.address))


REQUEST_TOKENS, MOST_HITS, RESERVE, OVERFLOW = 64, 4 * 64, 256, 4
"""Prompt tokens that a request on a decode worker counts as; the most that its hits count; tokens of an answer that
should find room; how many requests one beyond the batch counts besides itself."""


@dataclass(frozen=True, slots=True)
class ByTokens(PlainPolicy):
    """What Diptych did before it predicted times: the fewest prompt tokens to compute, and requests as tokens."""

    def pick(self, workers: Sequence[Worker], shape: RequestShape) -> Worker:
        cost = _decode_tokens if workers[0].role == "decode" else _prefill_tokens
        return min(workers, key=lambda worker: (*cost(worker, shape), worker.num_dispatched, worker.address))


def _prefill_tokens(worker: Worker, shape: RequestShape) -> tuple[bool, bool, int, int]:
    return worker.suspect, False, worker.num_queued_tokens + shape.uncached(worker), worker.num_requests


def _decode_tokens(worker: Worker, shape: RequestShape) -> tuple[bool, bool, int, int]:
    uncached, num_requests = shape.uncached(worker), worker.num_requests
    overflow = max(0, num_requests + 1 - max(1, worker.identity.max_num_seqs))
    tokens = worker.num_queued_tokens + REQUEST_TOKENS * (num_requests + OVERFLOW * overflow)
    lacks_room = worker.num_blocks_of(uncached + min(shape.num_remaining, RESERVE)) > worker.num_available_blocks
    return worker.suspect, lacks_room, tokens - min(shape.num_tokens - uncached, MOST_HITS), num_requests


POLICIES: dict[str, Callable[[int, random.Random], RoutingPolicy]] = {
    "diptych": lambda threshold, source: RoutingPolicy(threshold),
    "random": lambda threshold, source: Random(threshold, source),
    "round-robin": lambda threshold, source: RoundRobin(threshold),
    "least-loaded": lambda threshold, source: LeastLoaded(threshold),
    "prefix-only": lambda threshold, source: PrefixOnly(threshold),
    "by-tokens": lambda threshold, source: ByTokens(threshold),
}
"""By name, made from the router's `local_prefill_threshold` and a source of chance."""
