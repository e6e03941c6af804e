"""Queueing formulas: waiting times and numbers in multi-server queues. Pure.

The probability of waiting is Erlang's C. The mean wait of a G/G/m queue is that of M/M/m times the mean of the squared
coefficients of variation of arrivals and service (the approximation of Allen and Cunneen: A. O. Allen, "Probability,
Statistics, and Queueing Theory", 2nd edition, 1990; after Kingman, "The single server queue in heavy traffic", 1961).
The wait of those that wait is exponential in heavy traffic (Kingman, "On queues in heavy traffic", 1962), which is
assumed here in general. The number in a system without waiting is nearly normal; its variance over its mean is 1 for
Poisson arrivals.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

HALVINGS = 24
"""Bisection steps for a quantile: precision of 1e-7 of the interval."""


@dataclass(frozen=True, slots=True)
class QueueWait:
    """A request waits with `probability`, and then for `mean_s` seconds on average."""

    probability: float
    mean_s: float

    def exceeds(self, seconds: float) -> float:
        """Return the probability of a wait above `seconds`; 1 for negative values."""
        if seconds < 0.0:
            return 1.0
        return self.probability * math.exp(-seconds / self.mean_s) if self.mean_s > 0.0 else 0.0


NO_LIMIT = QueueWait(1.0, math.inf)
"""More arrives than can be served: waits grow without limit."""


def erlang_c(num_servers: int, offered: float) -> float:
    """Return the probability of waiting at `num_servers` with `offered` seconds of work per second, below their number.

    Uses the stable recursion of Erlang's B.
    """
    blocked = 1.0
    for server in range(1, num_servers + 1):
        blocked = offered * blocked / (server + offered * blocked)
    used = offered / num_servers
    return blocked / (1.0 - used * (1.0 - blocked))


def wait(num_servers: int, rate: float, service_s: Sequence[float], arrivals_scv: float) -> QueueWait:
    """Return the wait for one of `num_servers` with equally likely service times `service_s`.

    `rate` is the arrival rate per second. `arrivals_scv` is the squared coefficient of variation of interarrival times.
    """
    if not service_s or rate <= 0.0:
        return QueueWait(0.0, 0.0)
    mean_s = sum(service_s) / len(service_s)
    if rate * mean_s >= num_servers:
        return NO_LIMIT
    variance = sum((seconds - mean_s) ** 2 for seconds in service_s) / len(service_s)
    variability = (arrivals_scv + variance / mean_s**2) / 2
    offered = rate * mean_s
    return QueueWait(erlang_c(num_servers, offered), max(1e-9, variability) * mean_s / (num_servers - offered))


def late(queue: QueueWait, own_s: Sequence[float], seconds: float) -> float:
    """Return the fraction of requests whose wait plus own time exceeds `seconds`.

    `own_s` are equally likely own times, independent of the wait.
    """
    return sum(queue.exceeds(seconds - own) for own in own_s) / len(own_s) if own_s else 0.0


def response_quantile(queue: QueueWait, own_s: Sequence[float], quantile: float) -> float:
    """Return the quantile of wait plus own time in seconds; infinity if waits grow without limit."""
    if not own_s:
        return 0.0
    if math.isinf(queue.mean_s):
        return math.inf
    low, high = 0.0, max(own_s) + queue.mean_s * max(0.0, -math.log(1.0 - quantile)) + 1e-9
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if late(queue, own_s, middle) <= 1.0 - quantile else (middle, high)
    return high


def peak(mean: float, dispersion: float, quantile: float) -> float:
    """Return the quantile of the number in a system. `dispersion` is its variance over its mean."""
    return mean + max(0.0, NormalDist().inv_cdf(quantile)) * math.sqrt(mean * dispersion)
