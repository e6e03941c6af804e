"""How many requests other routers send for each of this one, by what workers report. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from common.observe import Ewma
from router.fleet.worker import Worker

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
            own += worker.booked.num_requests - worker.fresh.num_requests
        if own:
            reported = 0
            for worker in decode:
                reported += worker.num_requests - worker.fresh.num_requests
            self._average.observe(min(MAX_RIVALS, max(0.0, reported / own - 1.0)))
