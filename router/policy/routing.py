"""Which workers serve a request. Pure: worker state, the request and `now` go in, a choice comes out; no chance.

The cost of a place is the time that the request would take there, and the time that it takes from the sequences that
run there already (`forecast.py`). Costs that differ by less than predictions err count as equal: these go to the worker
with fewer requests, then to the one that got fewer so far, so equal workers take turns; then each router has an order
of its own, so that routers do not choose the same worker between two of its reports.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from common.latency import StepModel
from router.fleet import Worker, by_fingerprint
from router.policy.forecast import (
    Forecast,
    Terms,
    chunk_s,
    computed_there,
    hidden_s,
    joined,
    num_lacking_blocks,
    on_decode,
    on_prefill,
    terms_of,
)
from router.policy.output_lengths import UNKNOWN_LENGTH
from router.policy.policy import Choice, Policy
from router.policy.request_shape import NO_HITS, RequestShape

TOLERANCE, MOST_TOLERANCE, TOLERANCE_S = 0.1, 0.5, 1e-3
"""By so much of the least cost, and so many seconds, others may differ from it and count as equal: more where the two
workers' models of their steps err by more, up to a bound."""
FEW_STEPS = 64
"""A model of fewer steps does not know yet how far it errs."""
HIT_TOKENS, MOST_SPARED = 64, 4
"""So many tokens that a decode worker has make up for a request, up to so many requests: beyond that an idle worker is
taken, so one shared prompt never pins all traffic."""
LEAST_GAIN, LEAST_GAIN_S = 0.8, 0.02
"""Where a prompt is computed against the threshold costs at most this share, and so many seconds less: predictions
err, and prompts between tokens make gaps."""
URGENT_SHARE = 0.5
"""Of the time until a first token is due: a prompt whose first token is predicted later on one side is computed on the
other, where that is sooner, while the goal for tokens bounds what others lose by it."""
USUAL = RequestShape(2048, UNKNOWN_LENGTH, NO_HITS)
"""A request by whose cost workers are compared before one is known."""


class _Place(msgspec.Struct, frozen=True, gc=False):
    """A worker, the forecast there, and what decides between it and others: the least rank, then the least cost."""

    worker: Worker
    terms: Terms
    forecast: Forecast
    rank: tuple[bool, bool, bool]
    cost_s: float
    hits: int = 0

    @property
    def turn(self) -> tuple[int, int, int, str]:
        """Which of equal places is taken: the least. Tokens that are there already count as so many requests less."""
        worker = self.worker
        spared = min(MOST_SPARED, self.hits // HIT_TOKENS)
        return (self.terms.num_likely - spared, worker.bookings.num_dispatched, worker.order, worker.address)


class RoutingPolicy(Policy):
    """The built-in policy: the least predicted cost.

    A prompt with at most `local_prefill_threshold` uncached tokens is computed by its decode worker, a longer one by a
    prefill worker, unless the other is predicted to be better: to cost less, or, where there are goals, to give a first
    token in time that would be about late. With a threshold of 0 decode workers compute no prompt while a prefill
    worker is ready.
    """

    weighs_all = False

    def choose(
        self, prefill: Sequence[Worker], decode: Sequence[Worker], shape: RequestShape, now: float
    ) -> Choice | None:
        """Workers for a new request, out of ready ones; None when none can take it."""
        if shape.num_remaining == 1 and prefill:
            best = _best([_prefill_place(worker, shape, now) for worker in prefill])
            return Choice(best.worker, None, best.forecast)
        partners = {} if shape.alone else by_fingerprint(prefill)
        found = [
            self._pair(partners.get(fingerprint, []), group, shape, now)
            for fingerprint, group in by_fingerprint(decode).items()
        ]
        return min(found, key=lambda pair: pair[0], default=(None, None))[1]

    def choose_prefill(
        self, prefill: Sequence[Worker], decode: Worker, shape: RequestShape, now: float
    ) -> Worker | None:
        partners = [] if shape.alone else by_fingerprint(prefill).get(decode.identity.fingerprint, [])
        return self._pair(partners, [decode], shape, now)[1].prefill

    def _pair(
        self, prefill: Sequence[Worker], decode: Sequence[Worker], shape: RequestShape, now: float
    ) -> tuple[tuple[object, ...], Choice]:
        """The best choice among workers of one fingerprint, behind its cost."""
        remote = [_decode_place(worker, shape) for worker in decode]
        if not prefill:
            return _alone(_best([_local_place(place, shape, now) for place in remote]))
        first = _best([_prefill_place(worker, shape, now) for worker in prefill])
        then = _best(remote)
        cost_s = _pair_s(first, then)
        local = (self._local(place, first, then, cost_s, shape, now) for place in remote)
        if alone := [place for place in local if place is not None]:
            return _alone(_best(alone))
        rank = (max(first.rank, then.rank), cost_s, *then.turn)
        return rank, Choice(first.worker, then.worker, joined(first.forecast, then.forecast))

    def _local(
        self, place: _Place, first: _Place, then: _Place, remote_s: float, shape: RequestShape, now: float
    ) -> _Place | None:
        """The place of a decode worker that should compute the prompt although there are prefill workers, or None.

        `remote_s` is the cost of these.
        """
        if place.rank > then.rank:
            return None
        if shape.tpot_s and (urgent := self._urgent(place, first, shape, now)) is not None:
            return urgent
        worker, uncached = place.worker, shape.num_tokens - place.hits
        holds_more = _holds_more(place, first.worker, shape)
        # The tokens after the first must not hide that the prefill worker would compute an answer again.
        same_s = shape.num_expected * min(place.forecast.token_s, then.forecast.token_s) if holds_more else 0.0
        if uncached > self.local_prefill_threshold:
            least_s = place.cost_s - place.forecast.transfer_s  # before it computes anything
            if self.local_prefill_threshold == 0 or not _is_better(least_s - same_s, remote_s - same_s):
                return None
        local = _local_place(place, shape, now, first.worker)
        known = local.forecast.is_known and first.forecast.is_known
        if known and _is_late_there(local.forecast, first.forecast, shape):
            return None
        if uncached <= self.local_prefill_threshold:
            near = worker is then.worker or local.cost_s <= remote_s or (known and holds_more)
            return local if near and not (known and _is_better(remote_s, local.cost_s)) else None
        return local if known and _is_better(local.cost_s - same_s, remote_s - same_s) else None

    def _urgent(self, place: _Place, first: _Place, shape: RequestShape, now: float) -> _Place | None:
        """The place of a decode worker that gives a first token sooner, when a prefill worker would be about late.

        A worker that knows the goal makes its chunks as small as that needs (`step_budget.py`), so what others lose
        there does not count; one whose chunks are too large for the goal is no such place.
        """
        remote_s = first.forecast.ttft_s
        if not (self.local_prefill_threshold and shape.tpot_s and remote_s > URGENT_SHARE * shape.ttft_s > 0):
            return None
        there = computed_there(place.worker, shape, place.forecast, now, first.worker)
        is_sooner = there.ttft_s + there.place_s < remote_s - LEAST_GAIN_S
        if not (there.is_known and first.forecast.is_known and is_sooner and there.token_s <= shape.tpot_s):
            return None
        if chunk_s(place.worker, shape) > shape.tpot_s:
            return None
        cost_s = _decode_cost_s(there, shape) - there.delay_s
        return _Place(place.worker, place.terms, there, place.rank, cost_s, place.hits)


def usual_cost(worker: Worker) -> tuple[bool, float]:
    """What a usual request would cost on a worker at its last report: whether it does not fit well, and seconds."""
    is_prefill = worker.role == "prefill"
    place = _prefill_place(worker, USUAL, worker.load.beat_at) if is_prefill else _decode_place(worker, USUAL)
    return True in place.rank, place.cost_s


def _is_late_there(there: Forecast, first: Forecast, shape: RequestShape) -> bool:
    """Whether a first token would be about late on a decode worker, whose batch it must join, but not elsewhere."""
    there_s = there.ttft_s + there.place_s
    return bool(shape.tpot_s) and there_s > URGENT_SHARE * shape.ttft_s > 0 and first.ttft_s < there_s - LEAST_GAIN_S


def _decode_place(worker: Worker, shape: RequestShape) -> _Place:
    """A decode worker for an answer whose prompt a prefill worker computes."""
    terms, forecast, uncached = terms_of(worker), on_decode(worker, shape), shape.uncached(worker)
    cuts = shape.num_tokens + shape.num_remaining > terms.max_tokens  # an answer of full length
    lacks_room = num_lacking_blocks(terms, uncached + shape.num_expected) > 0
    rank, hits = (cuts, worker.life.suspect, lacks_room), shape.num_tokens - uncached
    return _Place(worker, terms, forecast, rank, _decode_cost_s(forecast, shape), hits)


def _local_place(place: _Place, shape: RequestShape, now: float, first: Worker | None = None) -> _Place:
    """The same worker, when it computes the prompt itself instead of the prefill worker `first`.

    When it holds more of the prompt, it is tried although it has computed none yet.
    """
    like = first if first is not None and _holds_more(place, first, shape) else None
    forecast = computed_there(place.worker, shape, place.forecast, now, like)
    return _Place(place.worker, place.terms, forecast, place.rank, _decode_cost_s(forecast, shape), place.hits)


def _holds_more(place: _Place, first: Worker, shape: RequestShape) -> bool:
    """Whether a decode worker holds more of the prompt than a prefill worker, such as the answer before a next turn."""
    return place.hits > shape.hits.get(first.address, 0)


def _decode_cost_s(forecast: Forecast, shape: RequestShape) -> float:
    own_s = forecast.ttft_s + forecast.place_s + forecast.transfer_s + shape.num_expected * forecast.token_s
    return own_s + forecast.delay_s


def _pair_s(first: _Place, then: _Place) -> float:
    """The cost of a prefill and a decode worker: the transfer takes what prefill does not hide."""
    return first.cost_s + then.cost_s - hidden_s(first.forecast.prompt_s, then.forecast.transfer_s)


def _is_better(cost_s: float, other_s: float) -> bool:
    """Whether a place is better than another by more than predictions err."""
    return cost_s < min(LEAST_GAIN * other_s, other_s - LEAST_GAIN_S)


def _prefill_place(worker: Worker, shape: RequestShape, now: float) -> _Place:
    terms, forecast = terms_of(worker), on_prefill(worker, shape, now)
    cost_s = forecast.ttft_s + terms.rivals_s
    return _Place(worker, terms, forecast, (False, worker.life.suspect, False), cost_s)


def _alone(place: _Place) -> tuple[tuple[object, ...], Choice]:
    return (place.rank, place.cost_s, *place.turn), Choice(None, place.worker, place.forecast)


def _best(places: Sequence[_Place]) -> _Place:
    """The place of the least cost, or the one among about equal ones whose worker has least to do."""
    if len(places) == 1:
        return places[0]
    least = min(places, key=lambda place: (place.rank, place.cost_s))
    most_s, surely_s = (1.0 + MOST_TOLERANCE) * least.cost_s + TOLERANCE_S, least.cost_s + TOLERANCE_S
    near = (place for place in places if place.cost_s <= most_s and place.rank == least.rank)
    equal = [place for place in near if place.cost_s <= surely_s or place.cost_s <= _equal_s(least, place)]
    if len(equal) == 1:
        return least
    return min(equal, key=lambda place: place.turn)


def _error_of(model: StepModel) -> float:
    """How far a prediction may be off: a model of few steps does not know it yet."""
    return model.error if model.num_steps >= FEW_STEPS else MOST_TOLERANCE


def _equal_s(least: _Place, other: _Place) -> float:
    """Up to which cost the other place counts as equal to the least.

    Two workers that are predicted by one model differ by their work alone.
    """
    first, second = least.terms.model, other.terms.model
    if first is second or first == second:
        return least.cost_s + TOLERANCE_S
    share = min(MOST_TOLERANCE, max(TOLERANCE, _error_of(first) + _error_of(second)))
    return (1.0 + share) * least.cost_s + TOLERANCE_S
