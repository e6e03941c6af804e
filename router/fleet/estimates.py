"""Averages of what models of steps do not predict, and of the load that other routers send. Pure.

Each average serves all workers of a role. It changes no choice between them, and no worker is avoided for a slow past.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from common.observe import Ewma
from router.fleet.worker import Worker

LEAST_S, MOST_S, LAG_SMOOTHING = 1e-4, 1.0, 0.05
"""Between which a lag is believed; the share of one more first token in the average."""


class FirstTokenLag:
    """`seconds` is the recent geometric mean, between `LEAST_S` and `MOST_S`; 0 before any first token.

    Of lags that are spread over decades, an arithmetic mean would say what the longest say.
    """

    def __init__(self) -> None:
        self._logs: Ewma | None = None

    @property
    def seconds(self) -> float:
        return math.exp(self._logs.value) if self._logs is not None else 0.0

    def observe(self, measured_s: float, predicted_s: float) -> None:
        """A first token came after `measured_s`, by the model of steps `predicted_s`."""
        if self._logs is None:
            self._logs = Ewma(LAG_SMOOTHING)
        self._logs.observe(math.log(min(MOST_S, max(LEAST_S, measured_s - predicted_s))))


LEAST, MOST, PACE_SMOOTHING = 0.25, 2.0, 0.05
"""Between which a pace is believed; the share of one more answer in the average."""
MIN_TOKENS = 8
"""Answers of fewer tokens say little about the mean of one."""


class TokenPace:
    """`value` is the recent geometric mean, between `LEAST` and `MOST`; 1 before any answer."""

    def __init__(self) -> None:
        self._average = Ewma(PACE_SMOOTHING, start=0.0)

    @property
    def value(self) -> float:
        return min(MOST, max(LEAST, math.exp(self._average.value)))

    def observe(self, decode_s: float, num_tokens: int, predicted_s: float) -> None:
        """An answer has ended: its `num_tokens` later tokens took `decode_s`, by the model `predicted_s` each."""
        if num_tokens >= MIN_TOKENS and predicted_s > 0.0 and decode_s > 0.0:
            ratio = decode_s / num_tokens / predicted_s
            self._average.observe(math.log(min(MOST, max(LEAST, ratio))))


MAX_RIVALS, RIVALS_SMOOTHING = 15.0, 0.2
"""Requests of other routers for each of this one, at most; the share of one more look in their average."""


class Rivals:
    """`value` is the recent average; 0 for a router alone."""

    def __init__(self) -> None:
        self._average = Ewma(RIVALS_SMOOTHING, start=0.0)

    @property
    def value(self) -> float:
        return self._average.value

    def observe(self, decode: Sequence[Worker]) -> None:
        """Compare what ready decode workers report with what this router has booked there."""
        own = 0
        for worker in decode:  # a thousand, at each tick
            own += worker.bookings.total.num_requests - worker.bookings.fresh.num_requests
        if own:
            reported = 0
            for worker in decode:
                reported += worker.load.num_requests - worker.bookings.fresh.num_requests
            self._average.observe(min(MAX_RIVALS, max(0.0, reported / own - 1.0)))
