"""Averages that correct predictions: errors of step models, and the load from other routers. Pure.

Each average applies to all workers of a role. It does not affect the choice between them, so no worker is avoided
because it was slow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from common.observe import Ewma
from router.fleet.worker import Worker

LEAST_S, MOST_S, LAG_SMOOTHING = 1e-4, 1.0, 0.05
"""Limits of an observed lag, and smoothing factor of its average."""


class FirstTokenLag:
    """Geometric mean of the recent lags of first tokens, from `LEAST_S` to `MOST_S` seconds; 0 before the first one.

    Lags spread over decades, so an arithmetic mean would reflect only the longest ones.
    """

    def __init__(self) -> None:
        self._logs: Ewma | None = None

    @property
    def seconds(self) -> float:
        return math.exp(self._logs.value) if self._logs is not None else 0.0

    def observe(self, measured_s: float, predicted_s: float) -> None:
        """Record a first token that arrived after `measured_s` instead of `predicted_s`."""
        if self._logs is None:
            self._logs = Ewma(LAG_SMOOTHING)
        self._logs.observe(math.log(min(MOST_S, max(LEAST_S, measured_s - predicted_s))))


LEAST, MOST, PACE_SMOOTHING = 0.25, 2.0, 0.05
"""Limits of an observed pace, and smoothing factor of its average."""
MIN_TOKENS = 8
"""Minimum length of an answer whose mean time per token is used."""


class TokenPace:
    """Geometric mean of measured over predicted time per token, from `LEAST` to `MOST`; 1 before the first answer."""

    def __init__(self) -> None:
        self._average = Ewma(PACE_SMOOTHING, start=0.0)

    @property
    def value(self) -> float:
        return min(MOST, max(LEAST, math.exp(self._average.value)))

    def observe(self, decode_s: float, num_tokens: int, predicted_s: float) -> None:
        """Record an answer whose `num_tokens` later tokens took `decode_s`, predicted as `predicted_s` each."""
        if num_tokens >= MIN_TOKENS and predicted_s > 0.0 and decode_s > 0.0:
            ratio = decode_s / num_tokens / predicted_s
            self._average.observe(math.log(min(MOST, max(LEAST, ratio))))


MAX_OTHER_ROUTERS, OTHER_ROUTERS_SMOOTHING = 15.0, 0.2
"""Limit of the ratio, and smoothing factor of its average."""


class OtherRouters:
    """Recent average of other routers' requests per request of this router; 0 for a single router."""

    def __init__(self) -> None:
        self._average = Ewma(OTHER_ROUTERS_SMOOTHING, start=0.0)

    @property
    def value(self) -> float:
        return self._average.value

    def observe(self, decode: Sequence[Worker]) -> None:
        """Compare the reports of ready decode workers with this router's bookings."""
        own = 0
        for worker in decode:  # up to a thousand, at each tick
            own += worker.bookings.total.num_requests - worker.bookings.fresh.num_requests
        if own:
            reported = 0
            for worker in decode:
                reported += worker.load.num_requests - worker.bookings.fresh.num_requests
            self._average.observe(min(MAX_OTHER_ROUTERS, max(0.0, reported / own - 1.0)))
