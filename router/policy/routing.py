"""The built-in routing policy. Pure and deterministic.

The cost of a worker is the predicted time of the request there, plus the delay of the sequences that already run there
(`forecast.py`). Costs that differ by less than the prediction error count as equal. Ties are broken by the number of
requests, then by the number of requests so far, then by an order that differs between routers, so that they do not all
choose the same worker between two of its reports.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from common.latency import StepModel
from router.fleet import Worker, by_fingerprint
from router.policy.forecast import (
    Forecast,
    chunk_s,
    combined,
    forecast_decode,
    forecast_inputs,
    forecast_local,
    forecast_prefill,
    hidden_s,
    num_held_blocks,
    num_lacking_blocks,
)
from router.policy.output_lengths import UNKNOWN_LENGTH
from router.policy.policy import Candidate, Choice, Considered, Policy
from router.policy.request_shape import NO_HITS, RequestShape

TOLERANCE, MOST_TOLERANCE, TOLERANCE_S = 0.1, 0.5, 1e-3
"""Costs up to this fraction plus this many seconds above the minimum count as equal. The fraction increases with the
errors of the two workers' step models, up to the second value."""
FEW_STEPS = 64
"""Minimum number of steps after which a step model's error estimate is used."""
LEAST_GAIN, LEAST_GAIN_S = 0.8, 0.02
"""A prompt is computed on the side opposite to the threshold only if that costs at most this fraction, and this many
seconds less. Predictions have errors, and prompts cause gaps between tokens."""
URGENT_SHARE = 0.5
"""Fraction of the time until a first token is due. If one side is predicted to be later, the prompt is computed on the
other side if that is sooner, as far as the goal for tokens limits the delay of others."""
URGENT_SPARE_SHARE = 0.7
"""Fraction of a decode worker's KV blocks that must remain spare if it computes an urgent prompt. With fewer, answers
whose prompts others compute would wait for blocks, and miss the goal for tokens."""
USUAL = RequestShape(2048, UNKNOWN_LENGTH, NO_HITS)
"""Reference request for comparing workers before a request is known."""


class RoutingPolicy(Policy):
    """Chooses the workers with the lowest predicted cost.

    A prompt with at most `local_prefill_threshold` uncached tokens is computed by its decode worker, a longer one by a
    prefill worker. The other side is used if it is predicted to cost less, or, with goals, if only it would be in time.
    With a threshold of 0, decode workers compute no prompts while a prefill worker is ready.
    """

    weighs_all = False

    def choose(
        self, prefill: Sequence[Worker], decode: Sequence[Worker], shape: RequestShape, now: float
    ) -> Choice | None:
        """Return the workers for a new request, None if none can take it."""
        if shape.num_remaining == 1 and prefill:
            places = [_prefill_place(worker, shape, now) for worker in prefill]
            best = _best(places)
            return Choice(best.worker, None, best.forecast, (Considered(places),))
        partners = {} if shape.alone else by_fingerprint(prefill)
        found = [
            self._pair(partners.get(fingerprint, []), group, shape, now)
            for fingerprint, group in by_fingerprint(decode).items()
        ]
        if len(found) == 1:
            return found[0][1]
        if not found:
            return None
        _, chosen = min(found, key=lambda pair: pair[0])
        return replace(chosen, considered=tuple(group for _, choice in found for group in choice.considered))

    def choose_prefill(
        self, prefill: Sequence[Worker], decode: Worker, shape: RequestShape, now: float
    ) -> Worker | None:
        partners = [] if shape.alone else by_fingerprint(prefill).get(decode.identity.fingerprint, [])
        return self._pair(partners, [decode], shape, now)[1].prefill

    def _pair(
        self, prefill: Sequence[Worker], decode: Sequence[Worker], shape: RequestShape, now: float
    ) -> tuple[tuple[object, ...], Choice]:
        """Return the best choice among workers of one fingerprint, preceded by its sort key."""
        remote = [_decode_place(worker, shape) for worker in decode]
        if not prefill:
            places = [_local_place(place, shape, now) for place in remote]
            return _alone(_best(places), Considered(local=places))
        firsts = [_prefill_place(worker, shape, now) for worker in prefill]
        first, then = _best(firsts), _best(remote)
        cost_s = _pair_s(first, then)
        local = (self._local(place, first, then, cost_s, shape, now) for place in remote)
        if alone := [place for place in local if place is not None]:
            return _alone(_best(alone), Considered(firsts, remote, alone, cost_s))
        rank = (max(first.rank, then.rank), cost_s, *then.turn)
        considered = (Considered(firsts, remote, remote_s=cost_s),)
        return rank, Choice(first.worker, then.worker, combined(first.forecast, then.forecast), considered)

    def _local(
        self, place: Candidate, first: Candidate, then: Candidate, remote_s: float, shape: RequestShape, now: float
    ) -> Candidate | None:
        """Return a decode worker that should compute the prompt although there are prefill workers, or None.

        `remote_s` is the cost with prefill workers.
        """
        if place.rank > then.rank:
            return None
        if shape.tpot_s and (urgent := self._urgent(place, first, shape, now)) is not None:
            return urgent
        worker, uncached = place.worker, shape.num_tokens - place.hits
        holds_more = _holds_more(place, first.worker, shape)
        # The cost of later tokens must not hide that the prefill worker would recompute an answer.
        same_s = shape.num_expected * min(place.forecast.token_s, then.forecast.token_s) if holds_more else 0.0
        if uncached > self.local_prefill_threshold:
            least_s = place.cost_s - place.forecast.transfer_s  # lower bound, without the prompt
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

    def _urgent(self, place: Candidate, first: Candidate, shape: RequestShape, now: float) -> Candidate | None:
        """Return a decode worker that produces the first token sooner if a prefill worker would be late, or None.

        A worker that knows the goal keeps its chunks small enough for it (`step_budget.py`), so the delay of others is
        not counted. Workers whose chunks are too large for the goal are excluded.
        """
        remote_s = first.forecast.ttft_s
        if not (self.local_prefill_threshold and shape.tpot_s and remote_s > URGENT_SHARE * shape.ttft_s > 0):
            return None
        there = forecast_local(place.worker, shape, place.forecast, now, first.worker)
        is_sooner = there.ttft_s + there.place_s < remote_s - LEAST_GAIN_S
        if not (there.is_known and first.forecast.is_known and is_sooner and there.token_s <= shape.tpot_s):
            return None
        if chunk_s(place.worker, shape) > shape.tpot_s or not _has_spare_blocks(place, shape):
            return None
        cost_s = _decode_cost_s(there, shape) - there.delay_s
        return Candidate(place.worker, place.inputs, there, place.rank, cost_s, place.hits)


def _has_spare_blocks(place: Candidate, shape: RequestShape) -> bool:
    """Return whether a decode worker can compute a prompt without keeping other answers waiting for blocks."""
    worker, inputs = place.worker, place.inputs
    beat, hello = worker.load.beat, worker.hello
    if beat is None or hello is None or beat.num_waiting or True in place.rank:
        return False
    num_blocks = num_held_blocks(inputs, shape.uncached(worker) + shape.num_expected)
    return inputs.num_spare_blocks - num_blocks >= URGENT_SPARE_SHARE * hello.num_blocks


def usual_cost(worker: Worker) -> tuple[bool, float]:
    """Return the cost of a usual request as of the last report: whether it does not fit well, and seconds."""
    is_prefill = worker.role == "prefill"
    place = _prefill_place(worker, USUAL, worker.load.beat_at) if is_prefill else _decode_place(worker, USUAL)
    return True in place.rank, place.cost_s


def _is_late_there(there: Forecast, first: Forecast, shape: RequestShape) -> bool:
    """Return whether a first token would be late on a decode worker, whose batch it must join, but not elsewhere."""
    there_s = there.ttft_s + there.place_s
    return bool(shape.tpot_s) and there_s > URGENT_SHARE * shape.ttft_s > 0 and first.ttft_s < there_s - LEAST_GAIN_S


def _decode_place(worker: Worker, shape: RequestShape) -> Candidate:
    """Evaluate a decode worker for an answer whose prompt a prefill worker computes."""
    inputs, forecast, uncached = forecast_inputs(worker), forecast_decode(worker, shape), shape.uncached(worker)
    cuts = shape.num_tokens + shape.num_remaining > inputs.max_tokens  # a full-length answer does not fit
    lacks_room = num_lacking_blocks(inputs, uncached + shape.num_expected) > 0
    rank, hits = (cuts, worker.life.suspect, lacks_room), shape.num_tokens - uncached
    return Candidate(worker, inputs, forecast, rank, _decode_cost_s(forecast, shape), hits)


def _local_place(place: Candidate, shape: RequestShape, now: float, first: Worker | None = None) -> Candidate:
    """Evaluate the same worker if it computes the prompt instead of the prefill worker `first`.

    It is considered even if it has not computed a prompt yet, if it caches more of the prompt, or there is a goal for
    tokens, which limits the chunks that it would compute.
    """
    like = first if first is not None and (shape.tpot_s or _holds_more(place, first, shape)) else None
    forecast = forecast_local(place.worker, shape, place.forecast, now, like)
    return Candidate(place.worker, place.inputs, forecast, place.rank, _decode_cost_s(forecast, shape), place.hits)


def _holds_more(place: Candidate, first: Worker, shape: RequestShape) -> bool:
    """Return whether a decode worker caches more of the prompt than a prefill worker, such as the previous answer."""
    return place.hits > shape.hits.get(first.address, 0)


def _decode_cost_s(forecast: Forecast, shape: RequestShape) -> float:
    own_s = forecast.ttft_s + forecast.place_s + forecast.transfer_s + shape.num_expected * forecast.token_s
    return own_s + forecast.delay_s


def _pair_s(first: Candidate, then: Candidate) -> float:
    """Return the cost of a prefill and a decode worker, without the part of the transfer that prefill hides."""
    return first.cost_s + then.cost_s - hidden_s(first.forecast.prompt_s, then.forecast.transfer_s)


def _is_better(cost_s: float, other_s: float) -> bool:
    """Return whether a cost is lower than another by more than the prediction error."""
    return cost_s < min(LEAST_GAIN * other_s, other_s - LEAST_GAIN_S)


def _prefill_place(worker: Worker, shape: RequestShape, now: float) -> Candidate:
    inputs, forecast = forecast_inputs(worker), forecast_prefill(worker, shape, now)
    cost_s = forecast.ttft_s + inputs.other_routers_s
    return Candidate(worker, inputs, forecast, (False, worker.life.suspect, False), cost_s)


def _alone(place: Candidate, considered: Considered) -> tuple[tuple[object, ...], Choice]:
    return (place.rank, place.cost_s, *place.turn), Choice(None, place.worker, place.forecast, (considered,))


def _best(places: Sequence[Candidate]) -> Candidate:
    """Return the candidate with the lowest cost, or the least loaded of about equal ones."""
    if len(places) == 1:
        return places[0]
    least = min(places, key=lambda place: (place.rank, place.cost_s))
    most_s, surely_s = (1.0 + MOST_TOLERANCE) * least.cost_s + TOLERANCE_S, least.cost_s + TOLERANCE_S
    near = (place for place in places if place.cost_s <= most_s and place.rank == least.rank)
    equal = [place for place in near if place.cost_s <= surely_s or place.cost_s <= equal_s(least, place)]
    if len(equal) == 1:
        return least
    return min(equal, key=lambda place: place.turn)


def _error_of(model: StepModel) -> float:
    """Return the relative error of a step model. Models of few steps have no estimate yet."""
    return model.error if model.num_steps >= FEW_STEPS else MOST_TOLERANCE


def equal_s(least: Candidate, other: Candidate) -> float:
    """Return the cost up to which the other candidate counts as equal to the cheapest.

    Candidates with the same model differ only by their work.
    """
    first, second = least.inputs.model, other.inputs.model
    if first is second or first == second:
        return least.cost_s + TOLERANCE_S
    share = min(MOST_TOLERANCE, max(TOLERANCE, _error_of(first) + _error_of(second)))
    return (1.0 + share) * least.cost_s + TOLERANCE_S
