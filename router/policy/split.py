"""How present workers could be divided between prefill and decode, and what each way is predicted to miss.

The planner's formulas predict it (`router/planner/sizing_forecaster.py`), and the process gives them to the dispatcher,
which lies below the planner: here is only what they say to each other.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from router.fleet import Worker


@dataclass(frozen=True, slots=True)
class SplitForecast:
    """Of the `num_offered` requests of the next `seconds`, and of answers that run now, `num_missed` would miss a goal:
    a number for each number of prefill workers that was looked at, the present one among them.

    The load was estimated from `num_seen` requests and will probably last for `lasting_s`. `load` describes it.
    """

    num_missed: Mapping[int, float]
    num_offered: float
    seconds: float
    lasting_s: float
    num_seen: int
    load: str


class SplitForecaster(Protocol):
    """Sees each request when it comes and when it has been answered, and predicts when it is asked."""

    def arrived(self, num_prompt: int, num_cached: int, most_output: int, now: float) -> None:
        """A request came, whatever becomes of it; it may have an answer of `most_output` tokens."""
        ...

    def turned_away(self, now: float) -> None:
        """A request was refused before it was read."""
        ...

    def ended(self, num_prompt: int, num_output: int) -> None:
        """A request was answered with so many tokens."""
        ...

    def forecast(
        self, workers: Collection[Worker], num_waiting: int, least: int, most: int, now: float
    ) -> SplitForecast | None:
        """What splits with `least` to `most` prefill workers would miss; None without goals or data.

        `workers` are all that are known, ready or not; `num_waiting` requests are on none of them.
        """
        ...
