"""Interface of a routing policy, and helpers for policies.

A policy is pure: it reads the request, the workers and `now`, and returns a choice. The same class is used in the
router and in `diptych simulate`. See docs/contributing/add-a-routing-policy.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

import msgspec

from router.fleet import Worker
from router.policy.forecast import Forecast, ForecastInputs, combined, forecast_decode, forecast_local, forecast_prefill
from router.policy.request_shape import RequestShape

UNPREDICTED = Forecast()
"""Forecast of a choice without one."""
HIT_TOKENS, MOST_SPARED = 64, 4
"""In ties, this many cached tokens on a decode worker count as one request less, up to the second value. Beyond that an
idle worker is preferred, so a shared prompt does not attract all traffic."""


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """A candidate worker with its forecast. The lowest rank wins, then the lowest cost.

    `rank`: whether the worker might cut the answer short, is suspect, lacks KV blocks. `hits`: cached prompt tokens.
    """

    worker: Worker
    inputs: ForecastInputs
    forecast: Forecast
    rank: tuple[bool, bool, bool]
    cost_s: float
    hits: int = 0

    @property
    def turn(self) -> tuple[int, int, int, str]:
        """Tie-breaker, lowest first. Cached tokens count as fewer requests."""
        worker = self.worker
        spared = min(MOST_SPARED, self.hits // HIT_TOKENS)
        return (self.inputs.num_likely - spared, worker.bookings.num_dispatched, worker.order, worker.address)


class Considered(msgspec.Struct, frozen=True, gc=False):
    """The candidates of one KV layout: prefill workers, decode workers for an answer whose prompt a prefill worker
    computes, and decode workers that would compute the prompt. `remote_s` is the cost of the best prefill and decode
    worker, in seconds.
    """

    prefill: Sequence[Candidate] = ()
    decode: Sequence[Candidate] = ()
    local: Sequence[Candidate] = ()
    remote_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Choice:
    """The workers of a request.

    Without `prefill` the decode worker computes the prompt. Without `decode` the answer has one token.

    If a policy omits the forecast, the router predicts it. `considered` is what `diptych explain` shows; may be empty.
    """

    prefill: Worker | None
    decode: Worker | None
    forecast: Forecast = UNPREDICTED
    considered: tuple[Considered, ...] = field(default=(), compare=False, repr=False)

    @property
    def local(self) -> bool:
        return self.prefill is None


class Policy(ABC):
    """Chooses the workers of each request.

    Methods run on the router's event loop, so they must not wait, do I/O or change their arguments. `choose` may be
    called several times for one request, also by admission, which asks where a request would go.
    """

    weighs_all: bool = True
    """Whether `choose` always gets every ready worker. If False, it gets a shortlist in pools of more than a few dozen
    workers: the cheapest ones by predicted time, and those that cache most of the prompt."""

    def __init__(self, local_prefill_threshold: int = 64, chance: Random | None = None) -> None:
        """`local_prefill_threshold` is the router's setting.

        `chance` is the source of random numbers, which keeps simulations repeatable.
        """
        self.local_prefill_threshold = local_prefill_threshold
        self.chance = chance or Random()

    @abstractmethod
    def choose(
        self, prefill: Sequence[Worker], decode: Sequence[Worker], shape: RequestShape, now: float
    ) -> Choice | None:
        """Choose among the ready workers that can take the request. None makes the request wait.

        `shape` contains the request's sizes, goals and prefix cache hits. `predict` returns the times on given workers,
        and `possible_choices` all valid choices.
        """

    def choose_prefill(
        self, prefill: Sequence[Worker], decode: Worker, shape: RequestShape, now: float
    ) -> Worker | None:
        """Choose a new prefill worker for a request whose prefill worker failed while `decode` keeps its blocks.

        None makes `decode` compute the prompt.
        """
        choice = self.choose(prefill, [decode], shape, now)
        return None if choice is None else choice.prefill


def predict(prefill: Worker | None, decode: Worker | None, shape: RequestShape, now: float) -> Forecast:
    """Predict the times of a request on these workers, at least one of which must be given; see `Choice`."""
    if decode is None:
        return UNPREDICTED if prefill is None else forecast_prefill(prefill, shape, now)
    if prefill is None:
        return forecast_local(decode, shape, forecast_decode(decode, shape), now)
    return combined(forecast_prefill(prefill, shape, now), forecast_decode(decode, shape))


def possible_choices(prefill: Sequence[Worker], decode: Sequence[Worker], shape: RequestShape) -> Iterator[Choice]:
    """Iterate over all choices that `choice_error` accepts, without forecasts."""
    if shape.num_remaining == 1:
        yield from (Choice(first, None) for first in prefill)
    for then in decode:
        yield Choice(None, then)
        if not shape.alone:
            fingerprint = then.identity.fingerprint
            yield from (Choice(first, then) for first in prefill if first.identity.fingerprint == fingerprint)


def choice_error(choice: Choice, prefill: Sequence[Worker], decode: Sequence[Worker], shape: RequestShape) -> str:
    """Return why a choice is invalid for these workers, or ""."""
    first, then = choice.prefill, choice.decode
    if first is None and then is None:
        return "chose no worker"
    if first is not None and not any(first is worker for worker in prefill):
        return f"chose {first.name} for prefill, which is not a candidate"
    if then is None:
        return "" if shape.num_remaining == 1 else "chose no decode worker for an answer of several tokens"
    if not any(then is worker for worker in decode):
        return f"chose {then.name} for decode, which is not a candidate"
    if first is not None and shape.alone:
        return "chose two workers for a request that one worker must serve"
    if first is not None and first.identity.fingerprint != then.identity.fingerprint:
        return f"chose {first.name} and {then.name}, which have different KV layouts"
    return ""
