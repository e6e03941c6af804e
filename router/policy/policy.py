"""Interface of a routing policy, and what all policies share.

A policy is pure: it reads the request, the workers and `now`, and returns a choice. The same class routes in a router
and in `diptych simulate`. docs/contributing/add-a-routing-policy.md shows how to write one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from router.fleet import Worker
from router.policy.forecast import Forecast, computed_there, joined, on_decode, on_prefill
from router.policy.request_shape import RequestShape

UNPREDICTED = Forecast()
"""The forecast of a choice that came without one."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The workers of a request. Without `prefill` the decode worker computes the prompt itself; without `decode` the
    answer has one token.

    A policy may leave the forecast out: the router then predicts the times of the chosen workers.
    """

    prefill: Worker | None
    decode: Worker | None
    forecast: Forecast = UNPREDICTED

    @property
    def local(self) -> bool:
        return self.prefill is None


class Policy(ABC):
    """Chooses the workers of each request.

    Methods run on the router's event loop, so they must not wait, do I/O or change their arguments. `choose` may be
    called several times for one request, also by admission, which asks where a request would go.
    """

    weighs_all: bool = True
    """Whether `choose` gets every ready worker. If False it gets a shortlist once a fleet exceeds a few dozen workers:
    the cheapest workers by predicted time, and those that cache most of the prompt."""

    def __init__(self, local_prefill_threshold: int = 64, chance: Random | None = None) -> None:
        """`local_prefill_threshold` is the router's setting. `chance` is the only source of random numbers that keeps
        simulations repeatable."""
        self.local_prefill_threshold = local_prefill_threshold
        self.chance = chance or Random()

    @abstractmethod
    def choose(
        self, prefill: Sequence[Worker], decode: Sequence[Worker], shape: RequestShape, now: float
    ) -> Choice | None:
        """Choose among the ready workers that can take the request. None makes the request wait.

        `shape` has the request's sizes, goals and prefix cache hits; `predict` gives the times at a pair of workers,
        and `possible_choices` all choices that are allowed.
        """

    def choose_prefill(
        self, prefill: Sequence[Worker], decode: Worker, shape: RequestShape, now: float
    ) -> Worker | None:
        """Choose a new prefill worker for a request whose own failed while `decode` keeps its blocks.

        None makes `decode` compute the prompt.
        """
        choice = self.choose(prefill, [decode], shape, now)
        return None if choice is None else choice.prefill


def predict(prefill: Worker | None, decode: Worker | None, shape: RequestShape, now: float) -> Forecast:
    """Predict the times of a request at these workers, at least one of which is given; see `Choice`."""
    if decode is None:
        return UNPREDICTED if prefill is None else on_prefill(prefill, shape, now)
    if prefill is None:
        return computed_there(decode, shape, on_decode(decode, shape), now)
    return joined(on_prefill(prefill, shape, now), on_decode(decode, shape))


def possible_choices(prefill: Sequence[Worker], decode: Sequence[Worker], shape: RequestShape) -> Iterator[Choice]:
    """All choices that `misfit` accepts, without forecasts."""
    if shape.num_remaining == 1:
        yield from (Choice(first, None) for first in prefill)
    for then in decode:
        yield Choice(None, then)
        if not shape.alone:
            fingerprint = then.identity.fingerprint
            yield from (Choice(first, then) for first in prefill if first.identity.fingerprint == fingerprint)


def misfit(choice: Choice, prefill: Sequence[Worker], decode: Sequence[Worker], shape: RequestShape) -> str:
    """Why a request cannot be served as chosen among these workers; "" if it can."""
    first, then = choice.prefill, choice.decode
    if first is None and then is None:
        return "chose no worker"
    if first is not None and not any(first is worker for worker in prefill):
        return f"chose {first.address} for prefill, which is no candidate"
    if then is None:
        return "" if shape.num_remaining == 1 else "chose no decode worker for an answer of several tokens"
    if not any(then is worker for worker in decode):
        return f"chose {then.address} for decode, which is no candidate"
    if first is not None and shape.alone:
        return "chose two workers for a request that one worker must serve"
    if first is not None and first.identity.fingerprint != then.identity.fingerprint:
        return f"chose {first.address} and {then.address}, between which KV cannot pass"
    return ""
