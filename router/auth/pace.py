"""How fast requests end, and so how long those that run will take to be gone. Pure: time comes in."""

from __future__ import annotations

from collections import deque

WINDOW_S = 30.0
MAX_ENDS = 256
MIN_ENDS = 4
LONGEST_S = 60.0


class Pace:
    """Remembers when the last requests ended, at most WINDOW_S back."""

    def __init__(self) -> None:
        self._ends: deque[float] = deque(maxlen=MAX_ENDS)

    def ended(self, now: float) -> None:
        """A request was answered."""
        self._ends.append(now)

    def drain_s(self, num_requests: int, now: float) -> float | None:
        """Seconds until `num_requests` will have ended, at most LONGEST_S; None when too few ended lately to tell."""
        while self._ends and now - self._ends[0] > WINDOW_S:
            self._ends.popleft()
        if len(self._ends) < MIN_ENDS:
            return None
        span_s = max(now - self._ends[0], 1e-3)
        return min(LONGEST_S, num_requests * span_s / len(self._ends))
