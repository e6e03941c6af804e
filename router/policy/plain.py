"""Simple routing policies: each compares the workers of one pool by one number."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from router.fleet import Worker
from router.policy.policy import Choice, Policy
from router.policy.request_shape import RequestShape


class PlainPolicy(Policy):
    """Picks a decode worker, then a prefill worker for prompts above `local_prefill_threshold` uncached tokens."""

    @abstractmethod
    def pick(self, workers: Sequence[Worker], shape: RequestShape) -> Worker:
        """Pick a worker of one pool for a request; `workers` is not empty."""

    def choose(
        self, prefill: Sequence[Worker], decode: Sequence[Worker], shape: RequestShape, now: float
    ) -> Choice | None:
        if shape.num_remaining == 1 and prefill:
            return Choice(self.pick(prefill, shape), None)
        if not decode:
            return None
        then = self.pick(decode, shape)
        return Choice(self.choose_prefill(prefill, then, shape, now), then)

    def choose_prefill(
        self, prefill: Sequence[Worker], decode: Worker, shape: RequestShape, now: float
    ) -> Worker | None:
        if shape.alone or shape.uncached(decode) <= self.local_prefill_threshold:
            return None
        fingerprint = decode.identity.fingerprint
        partners = [worker for worker in prefill if worker.identity.fingerprint == fingerprint]
        return self.pick(partners, shape) if partners else None


class RandomPolicy(PlainPolicy):
    """A random worker."""

    def pick(self, workers: Sequence[Worker], shape: RequestShape) -> Worker:
        return self.chance.choice(workers)


class RoundRobin(PlainPolicy):
    """The worker that got the fewest requests so far."""

    def pick(self, workers: Sequence[Worker], shape: RequestShape) -> Worker:
        return min(workers, key=lambda worker: (worker.bookings.num_dispatched, worker.address))


class LeastLoaded(PlainPolicy):
    """The worker with the fewest reported and booked requests."""

    def pick(self, workers: Sequence[Worker], shape: RequestShape) -> Worker:
        return min(
            workers, key=lambda worker: (worker.load.num_requests, worker.bookings.num_dispatched, worker.address)
        )


class PrefixOnly(PlainPolicy):
    """The worker that caches most of the prompt, whatever its load; ties by round robin."""

    def pick(self, workers: Sequence[Worker], shape: RequestShape) -> Worker:
        return min(workers, key=lambda worker: (shape.uncached(worker), worker.bookings.num_dispatched, worker.address))
