"""The highest rate within goals: which rate to try next, and when a trial is decided. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 1.96
"""Standard deviations: 95 % of trials are decided rightly."""
MOST_GROWTH, MOST_HALVINGS = 1e6, 6
NUM_BATCHES = 10


def wilson(share: float, num: float) -> tuple[float, float]:
    """The interval in which the true share lies, from the observed one of `num` independent requests.

    E. B. Wilson, "Probable inference, the law of succession, and statistical inference", 1927: unlike the normal
    approximation it is right for shares near 1.
    """
    if num <= 0:
        return 0.0, 1.0
    square = CONFIDENCE**2 / num
    middle = (share + square / 2) / (1 + square)
    spread = CONFIDENCE / (1 + square) * math.sqrt(share * (1 - share) / num + square / (4 * num))
    return max(0.0, middle - spread), min(1.0, middle + spread)


def num_independent(outcomes: Sequence[bool]) -> float:
    """How many independent requests say as much as these, which came one after another.

    Requests that meet one queue miss their goals together. Then the means of batches vary more than those of
    independent requests, and the number is smaller by that factor.
    """
    size = len(outcomes) // NUM_BATCHES
    share = sum(outcomes) / max(1, len(outcomes))
    if size < 2 or share in (0.0, 1.0):
        return float(len(outcomes))
    means = [sum(outcomes[begin : begin + size]) / size for begin in range(0, size * NUM_BATCHES, size)]
    middle = sum(means) / NUM_BATCHES
    variance = sum((mean - middle) ** 2 for mean in means) / (NUM_BATCHES - 1)
    return len(outcomes) / max(1.0, variance * size / (share * (1 - share)))


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the share of requests within goals is at least the target, from `num` of them.

    `low` and `high` bound the true share; `is_sure` when the target lies outside of them.
    """

    num: int
    num_good: int
    low: float
    high: float
    holds: bool
    is_sure: bool

    @property
    def share(self) -> float:
        return self.num_good / max(1, self.num)


def judge(outcomes: Sequence[bool], target: float) -> Verdict:
    """A verdict on requests in the order of their arrival."""
    num_good = sum(outcomes)
    share = num_good / max(1, len(outcomes))
    low, high = wilson(share, num_independent(outcomes))
    return Verdict(len(outcomes), num_good, low, high, share >= target, not low <= target <= high)


def is_lost(num_missed: int, num: int, target: float) -> bool:
    """Whether so many misses decide a trial of `num` requests, even if all others were good."""
    return wilson(1.0 - num_missed / num, num)[1] < target


@dataclass(slots=True)
class Trial:
    """One rate under test: when it has enough requests. It begins with `least` and doubles them `extensions` times.

    A trial that is not sure then is decided by the share alone; with `explores` one that seems to hold is decided so
    after the first doubling, because a higher rate is tried next.
    """

    target: float
    least: int
    extensions: int = 3
    explores: bool = False
    _wanted: int = 0

    def __post_init__(self) -> None:
        self._wanted = self.least

    @property
    def most(self) -> int:
        return self.least << self.extensions

    def look(self, outcomes: Sequence[bool | None]) -> Verdict | None:
        """The verdict once there is one. Outcomes are by arrival; None for a request whose outcome is open."""
        num_missed = sum(outcome is False for outcome in outcomes[: self._wanted])
        if is_lost(num_missed, self._wanted, self.target):
            return judge([outcome is not False for outcome in outcomes if outcome is not None], self.target)
        while None not in outcomes[: self._wanted] and len(outcomes) >= self._wanted:
            verdict = judge([bool(outcome) for outcome in outcomes[: self._wanted]], self.target)
            seems_so = self.explores and verdict.holds and self._wanted > self.least
            if verdict.is_sure or seems_so or self._wanted >= self.most:
                return verdict
            self._wanted *= 2
        return None

    def end(self, outcomes: Sequence[bool | None]) -> Verdict:
        """The verdict when time is over: open outcomes are misses."""
        return judge([bool(outcome) for outcome in outcomes[: self.most]], self.target)


class RateSearch:
    """Rates in requests a second to try: quadrupled until one misses, halved until one holds, then bisected.

    Bisection halves the quotient of the lowest rate that missed and the highest that held, until it is at most
    1 + `tolerance`.
    """

    def __init__(self, first: float, tolerance: float) -> None:
        if not 0.0 < first < math.inf:
            raise ValueError(f"the first rate must be above 0 and finite, not {first}")
        if not 0.0 < tolerance < 1.0:
            raise ValueError(f"the tolerance must lie between 0 and 1, not {tolerance}")
        self.held, self.missed = 0.0, math.inf
        self._first, self._tolerance = first, tolerance

    @property
    def next_rate(self) -> float | None:
        """The rate to try; None once the answer is known, or nothing holds or misses as far as is looked."""
        if not self.held and math.isinf(self.missed):
            return self._first
        if math.isinf(self.missed):
            return 4 * self.held if self.held < self._first * MOST_GROWTH else None
        if not self.held:
            return self.missed / 2 if self.missed > self._first / 2**MOST_HALVINGS else None
        return math.sqrt(self.held * self.missed) if self.missed / self.held > 1 + self._tolerance else None

    def observe(self, rate: float, holds: bool) -> None:
        if holds:
            self.held = max(self.held, rate)
        else:
            self.missed = min(self.missed, rate)
