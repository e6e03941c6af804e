"""Which workers serve a request. Pure: worker state, the request and `now` go in, a choice comes out; no chance.

The cost of a place is the time that the request would take there, and the time that it takes from the sequences that
run there already (`forecast.py`). Equal costs go to the worker with fewer requests, then to the one that got fewer so
far, so equal workers take turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.dispatch.forecast import Forecast, RequestShape, joined, on_decode, on_prefill
from router.fleet.registry import by_fingerprint
from router.fleet.worker import Worker

OUTPUT_RESERVE = 256
"""Output tokens that a decode worker should have room for; how many will come is unknown."""
LEAST_GAIN, LEAST_GAIN_S = 0.8, 0.02
"""Where a prompt is computed against the threshold costs at most this share, and so many seconds less: predictions
err, and prompts between tokens make gaps."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Without `prefill` the decode worker prefills itself; without `decode` the answer has one token."""

    prefill: Worker | None
    decode: Worker | None
    forecast: Forecast = Forecast()

    @property
    def local(self) -> bool:
        return self.prefill is None


@dataclass(frozen=True, slots=True)
class _Place:
    """A worker, the forecast there, and what decides between it and others: the least comes first."""

    worker: Worker
    forecast: Forecast
    rank: tuple[bool, bool, bool]
    cost_s: float

    @property
    def key(self) -> tuple[tuple[bool, bool, bool], float, int, int, str]:
        worker = self.worker
        return (self.rank, self.cost_s, worker.num_requests, worker.num_dispatched, worker.address)


@dataclass(frozen=True, slots=True)
class RoutingPolicy:
    """A prompt with at most `local_prefill_threshold` uncached tokens is computed by its decode worker, a longer one
    by a prefill worker, unless the other is predicted to be better.

    With a threshold of 0 decode workers compute no prompt while a prefill worker is ready.
    """

    local_prefill_threshold: int = 64

    def choose(
        self, prefill: Sequence[Worker], decode: Sequence[Worker], shape: RequestShape, now: float
    ) -> Choice | None:
        """Workers for a new request, out of ready ones; None when none can take it."""
        if shape.num_remaining == 1 and prefill:
            best = min((_prefill_place(worker, shape, now) for worker in prefill), key=_key)
            return Choice(best.worker, None, best.forecast)
        found = [
            self._pair([] if shape.alone else partners.get(fingerprint, []), group, shape, now)
            for partners in (by_fingerprint(prefill),)
            for fingerprint, group in by_fingerprint(decode).items()
        ]
        return min(found, key=lambda pair: pair[0], default=(None, None))[1]

    def choose_prefill(self, prefill: Sequence[Worker], decode: Worker, shape: RequestShape, now: float) -> Choice:
        """The prefill worker for a request on `decode`, or that `decode` should prefill itself."""
        partners = [] if shape.alone else by_fingerprint(prefill).get(decode.identity.fingerprint, [])
        return self._pair(partners, [decode], shape, now)[1]

    def _pair(
        self, prefill: Sequence[Worker], decode: Sequence[Worker], shape: RequestShape, now: float
    ) -> tuple[tuple[object, ...], Choice]:
        """The best choice among workers of one fingerprint, behind its cost."""
        local = [self._decode_place(worker, shape, now, local=True) for worker in decode]
        if not prefill:
            return _alone(min(local, key=_key))
        first = min((_prefill_place(worker, shape, now) for worker in prefill), key=_key)
        then = min((self._decode_place(worker, shape, now, local=False) for worker in decode), key=_key)
        cost_s = first.cost_s + then.cost_s
        alone = [place for place in local if self._may_be_local(place, first, then, cost_s, shape)]
        if alone:
            return _alone(min(alone, key=_key))
        rank = (max(first.rank, then.rank), cost_s, *then.key[2:])
        return rank, Choice(first.worker, then.worker, joined(first.forecast, then.forecast))

    def _may_be_local(self, place: _Place, first: _Place, then: _Place, remote_s: float, shape: RequestShape) -> bool:
        """Whether a decode worker should compute the prompt although there are prefill workers."""
        if place.rank > then.rank:
            return False
        known = place.forecast.is_known and first.forecast.is_known
        if shape.uncached(place.worker) <= self.local_prefill_threshold:
            near = place.worker is then.worker or place.cost_s <= remote_s
            return near and not (known and _is_better(remote_s, place.cost_s))
        return known and self.local_prefill_threshold > 0 and _is_better(place.cost_s, remote_s)

    def _decode_place(self, worker: Worker, shape: RequestShape, now: float, *, local: bool) -> _Place:
        forecast = on_decode(worker, shape, now, local=local)
        cuts = shape.num_tokens + shape.num_remaining > worker.max_tokens  # an answer of full length
        reserve = min(shape.num_remaining, OUTPUT_RESERVE)
        lacks_room = worker.num_blocks_of(shape.uncached(worker) + reserve) > worker.num_available_blocks
        cost_s = forecast.ttft_s + forecast.place_s + forecast.delay_s + shape.num_expected * forecast.token_s
        return _Place(worker, forecast, (cuts, worker.suspect, lacks_room), cost_s)


def _is_better(cost_s: float, other_s: float) -> bool:
    """Whether a place is better than another by more than predictions err."""
    return cost_s < min(LEAST_GAIN * other_s, other_s - LEAST_GAIN_S)


def _prefill_place(worker: Worker, shape: RequestShape, now: float) -> _Place:
    forecast = on_prefill(worker, shape, now)
    return _Place(worker, forecast, (False, worker.suspect, False), forecast.ttft_s)


def _alone(place: _Place) -> tuple[tuple[object, ...], Choice]:
    return place.key, Choice(None, place.worker, place.forecast)


def _key(place: _Place) -> tuple[tuple[bool, bool, bool], float, int, int, str]:
    return place.key
