"""What simulations say of a candidate: shares that met the goals, with intervals, and tails. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.load.summary import percentile
from benchmarks.plan.candidate import Candidate

STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""The 97.5 % points of Student's t for 1, 2, ... degrees of freedom."""
NORMAL = 1.96


@dataclass(frozen=True, slots=True)
class Trial:
    """One run. Requests arrived for `seconds`; latencies, in seconds, are of those served.

    `num_late_first` and `num_late_tokens` of the served missed the goal for TTFT, and for TPOT.
    """

    seed: int
    num_requests: int
    num_good: int
    num_refused: int
    num_failed: int
    num_late_first: int
    num_late_tokens: int
    num_tokens: int
    seconds: float
    ttft_s: tuple[float, ...]
    tpot_s: tuple[float, ...]

    @property
    def attainment(self) -> float:
        return self.num_good / self.num_requests


@dataclass(frozen=True, slots=True)
class Tails:
    """Milliseconds; 0 where nothing was served."""

    p50: float = 0.0
    p95: float = 0.0
    p99: float = 0.0

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Tails:
        ordered = sorted(seconds)
        return cls(*(percentile(ordered, q) * 1e3 for q in (50, 95, 99))) if ordered else cls()


@dataclass(frozen=True, slots=True)
class Evidence:
    """The runs of a candidate, at least one."""

    candidate: Candidate
    trials: tuple[Trial, ...]

    @property
    def attainment(self) -> float:
        """The share of all requests that met both goals."""
        return sum(trial.num_good for trial in self.trials) / self.num_requests

    @property
    def num_requests(self) -> int:
        return sum(trial.num_requests for trial in self.trials)

    @property
    def interval(self) -> tuple[float, float]:
        """Of the attainment, at 95 %: the wider of Wilson's over requests and Student's over runs.

        Requests of one run share its queues, so Wilson's is too narrow; with few equal runs Student's is.
        """
        low, high = wilson(sum(trial.num_good for trial in self.trials), self.num_requests)
        if len(self.trials) > 1:
            low_of_runs, high_of_runs = student([trial.attainment for trial in self.trials])
            low, high = min(low, low_of_runs), max(high, high_of_runs)
        return max(0.0, low), min(1.0, high)

    @property
    def ttft_ms(self) -> Tails:
        return Tails.of([value for trial in self.trials for value in trial.ttft_s])

    @property
    def tpot_ms(self) -> Tails:
        return Tails.of([value for trial in self.trials for value in trial.tpot_s])

    @property
    def seconds(self) -> float:
        return sum(trial.seconds for trial in self.trials)

    @property
    def goodput(self) -> float:
        """Requests a second that met both goals, while requests arrived."""
        return sum(trial.num_good for trial in self.trials) / self.seconds

    @property
    def tokens_per_s(self) -> float:
        """Output tokens of served requests over the time in which requests arrived."""
        return sum(trial.num_tokens for trial in self.trials) / self.seconds

    def share(self, field: str) -> float:
        """The share of requests that a field of `Trial` counts."""
        return float(sum(getattr(trial, field) for trial in self.trials)) / self.num_requests

    def token_cost(self, cost: float) -> float:
        """Of a million output tokens, where an hour costs `cost`; infinity where none came."""
        return cost / 3600.0 / self.tokens_per_s * 1e6 if self.tokens_per_s else math.inf


def wilson(num_good: int, num: int) -> tuple[float, float]:
    """The interval of a share (E. B. Wilson, "Probable inference, the law of succession", JASA 1927)."""
    share, square = num_good / num, NORMAL**2
    centre = (share + square / (2 * num)) / (1 + square / num)
    half = NORMAL / (1 + square / num) * math.sqrt(share * (1 - share) / num + square / (4 * num**2))
    return centre - half, centre + half


def student(values: Sequence[float]) -> tuple[float, float]:
    """The interval of the mean of at least two values."""
    num = len(values)
    mean = sum(values) / num
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (num - 1))
    half = STUDENT[min(num - 2, len(STUDENT) - 1)] * deviation / math.sqrt(num)
    return mean - half, mean + half
