"""Division of the time limit between measurement, simulation and confirmation. Times: seconds since the start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

LOAD_SHARE: Final = 0.12
"""Share of the time for which the load is driven with each setting that is measured."""
DEFAULTS_END, SEARCH_END, CONFIRMATION_END, HEADROOM_END = 0.36, 0.44, 0.9, 0.97
"""Shares of the time by which each part ends. The rest is for workers that stop."""
URL_DEFAULTS_END, URL_SEARCH_END = 0.5, 0.85
"""The same without a confirmation."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Deadlines of the parts of a run. `confirms`: settings are confirmed on real workers after the search."""

    limit_s: float
    confirms: bool = True

    @property
    def load_s(self) -> float:
        """Duration of the load, equal for all settings."""
        return LOAD_SHARE * self.limit_s

    @property
    def defaults_end_s(self) -> float:
        return self.limit_s * (DEFAULTS_END if self.confirms else URL_DEFAULTS_END)

    @property
    def search_end_s(self) -> float:
        return self.limit_s * (SEARCH_END if self.confirms else URL_SEARCH_END)

    @property
    def headroom_end_s(self) -> float:
        return self.limit_s * HEADROOM_END

    def confirmation_end_s(self, now_s: float, num_left: int, needed_s: float) -> float:
        """Return the deadline of the next of `num_left` confirmations.

        Those for which the time suffices share it. `needed_s`: time that each of them needs.
        """
        left_s = max(0.0, self.limit_s * CONFIRMATION_END - now_s)
        return now_s + left_s / min(num_left, max(1, int(left_s / needed_s)))
