"""Estimates from the rate at which requests end how long the running ones will take: a pure policy of the time."""

from __future__ import annotations

from collections import deque

from common.errors import MAX_RETRY_AFTER_S

WINDOW_S, MAX_ENDS = 30.0, 256
"""The estimate counts the ends of this long, and no more than these."""
MIN_ENDS = 4
"""Fewer ends give no estimate."""


class Pace:
    """The times at which the last requests ended."""

    def __init__(self) -> None:
        self._ends: deque[float] = deque(maxlen=MAX_ENDS)

    def ended(self, now: float) -> None:
        """Note that a request ended."""
        self._ends.append(now)

    def drain_s(self, num_requests: int, now: float) -> float | None:
        """Seconds until `num_requests` will have ended, at most MAX_RETRY_AFTER_S; None without enough recent ends."""
        while self._ends and now - self._ends[0] > WINDOW_S:
            self._ends.popleft()
        if len(self._ends) < MIN_ENDS:
            return None
        span_s = max(now - self._ends[0], 1e-3)
        return min(MAX_RETRY_AFTER_S, num_requests * span_s / len(self._ends))
