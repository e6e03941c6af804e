"""What became of each request, real or simulated, and both in numbers side by side."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Final

from benchmarks.load.summary import OK, Distribution, RequestRecord
from benchmarks.simulator.world.load import SimulatedRequest
from common.errors import Overloaded

MARK, GOODPUT_MARK = 0.10, 0.05
"""The shares by which a simulation may be off."""
LEAST_S: Final = 1e-9
EQUAL: Final = 0.03
"""Up to this share two policies bring the same goodput, and TTFT decides; up to this share that is the same as well."""


@dataclass(frozen=True, slots=True)
class Fate:
    """One request, in seconds; `at_s` is after the run's begin. NaN for what did not come.

    `outcome` is "ok", "refused" or what else became of it.
    """

    index: int
    at_s: float
    ttft_s: float
    tpot_s: float
    num_tokens: int
    num_cached: int
    outcome: str

    @classmethod
    def of_record(cls, record: RequestRecord, began: float) -> Fate:
        return cls(
            record.index,
            record.start - began,
            record.ttft_s,
            record.tpot_s,
            record.output_tokens,
            record.cached_tokens,
            "refused" if record.outcome == "http 429" else record.outcome,
        )

    @classmethod
    def of_simulated(cls, request: SimulatedRequest) -> Fate:
        return cls(
            request.number,
            request.arrival_s,
            request.ttft_s,
            request.tpot_s,
            request.num_tokens,
            request.num_cached,
            "refused" if request.outcome == Overloaded.__name__ else request.outcome,
        )

    @property
    def ended_s(self) -> float:
        """After the run's begin; NaN without a token."""
        return self.at_s + self.ttft_s + (self.num_tokens - 1) * (0.0 if math.isnan(self.tpot_s) else self.tpot_s)

    def as_row(self) -> list[Any]:
        """Its fields as JSON values: none is NaN, and seconds have six digits."""
        return [_as_value(getattr(self, name)) for name in self.__slots__]

    def meets(self, ttft_ms: float, tpot_ms: float) -> bool:
        """Whether it met both goals; an answer of one token has no time between tokens."""
        return self.outcome == OK and 1000 * self.ttft_s <= ttft_ms and not 1000 * self.tpot_s > tpot_ms


@dataclass(frozen=True, slots=True)
class Numbers:
    """A run. `goodput` is requests a second that met both goals, from the first one's start to the last one's end."""

    num_requests: int
    num_ok: int
    num_good: int
    outcomes: Mapping[str, int]
    seconds: float
    goodput: float
    ttft_ms: Distribution
    tpot_ms: Distribution
    num_cached: int

    @classmethod
    def of(cls, fates: Sequence[Fate], ttft_ms: float, tpot_ms: float) -> Numbers:
        served = [fate for fate in fates if fate.outcome == OK]
        first_s = min(fate.at_s for fate in fates)
        seconds = max((fate.ended_s for fate in served), default=first_s) - first_s
        num_good = sum(fate.meets(ttft_ms, tpot_ms) for fate in served)
        return cls(
            len(fates),
            len(served),
            num_good,
            dict(Counter(fate.outcome for fate in fates)),
            seconds,
            num_good / max(LEAST_S, seconds),
            Distribution.of_seconds(fate.ttft_s for fate in served),
            Distribution.of_seconds(fate.tpot_s for fate in served),
            sum(fate.num_cached for fate in served),
        )

    @property
    def values(self) -> dict[str, float]:
        """The numbers that are compared: milliseconds, and requests a second."""
        found = {
            f"{name} {quantile}": getattr(latency, quantile)
            for name, latency in (("TTFT", self.ttft_ms), ("TPOT", self.tpot_ms))
            for quantile in ("p50", "p90", "p99")
        }
        return {**found, "goodput": self.goodput}


def deviations(real: Numbers, simulated: Numbers) -> dict[str, float]:
    """By how much the simulation is off, as shares of the real values: above 0 where it says more."""
    expected, found = real.values, simulated.values
    return {name: (found[name] - value) / max(LEAST_S, value) for name, value in expected.items()}


def misses(shares: Mapping[str, float]) -> list[str]:
    """Which deviations are beyond the marks; that of p90 has none."""
    marks = {name: GOODPUT_MARK if name == "goodput" else MARK for name in shares if not name.endswith("p90")}
    return [name for name, mark in marks.items() if abs(shares[name]) > mark]


def pairs_ranked_alike(real: Mapping[str, Numbers], simulated: Mapping[str, Numbers]) -> tuple[int, int]:
    """How many pairs of policies stand in the same order in both, and how many pairs there are.

    Goodput orders them, then the p90 of TTFT. Two that are equal in one of both are never in another order.
    """
    pairs = list(combinations(real, 2))
    orders = ((_order(real[a], real[b]), _order(simulated[a], simulated[b])) for a, b in pairs)
    return sum(one * other >= 0 for one, other in orders), len(pairs)


def _order(one: Numbers, other: Numbers) -> int:
    """Above 0 if `one` is better, 0 if they are equal."""
    if by_goodput := _sign(one.goodput, other.goodput):
        return by_goodput
    return -_sign(one.ttft_ms.p90, other.ttft_ms.p90)


def _sign(one: float, other: float) -> int:
    if abs(one - other) <= EQUAL * max(one, other):
        return 0
    return 1 if one > other else -1


def _as_value(value: float | int | str) -> float | int | str | None:
    if isinstance(value, float):
        return None if math.isnan(value) else round(value, 6)
    return value
