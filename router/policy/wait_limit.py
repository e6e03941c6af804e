"""Maximum wait of new requests: long in a burst, short in an overload. Pure.

A burst is admitted as a whole. In a lasting overload, a long queue serves no more requests than a short one, and each
of them waits as long as it may. As in controlled delay, what matters is how long a queue has been bad, not how bad it
is (Nichols and Jacobson, "Controlling Queue Delay", ACM Queue 2012; for servers Maurer, "Fail at Scale", ACM Queue
2015).
"""

from __future__ import annotations

from dataclasses import dataclass

WINDOW_S = 2.0
"""Length of a window in which requests and rejections are counted, in seconds."""
NUM_WINDOWS = 3
"""Consecutive overloaded windows that make an overload. A burst and the retries of its clients are shorter."""
NUM_REFUSED, SHARE_REFUSED = 3, 0.2
"""Minimum number and fraction of rejected requests in an overloaded window."""
NUM_TURNS = 3
"""Minimum capacity of a short queue in requests. With fewer, workers would be idle between two requests."""


@dataclass(slots=True)
class WaitLimit:
    """Wait limit of one class: `longest_s`, or `reduced_s` in an overload, but at least `NUM_TURNS` requests' time."""

    longest_s: float
    reduced_s: float
    is_reduced: bool = False
    num_refused: int = 0  # in this window so far
    _num_asked: int = 0
    _num_windows: int = 0
    _window_ends: float = 0.0

    def count(self, *, refused: bool) -> None:
        """Count an admitted or rejected request."""
        self._num_asked += 1
        self.num_refused += refused

    def tick(self, now: float) -> bool:
        """Evaluate the window if it has ended. Returns True if the limit changes."""
        if now < self._window_ends:
            return False
        overloaded = self.num_refused >= max(NUM_REFUSED, SHARE_REFUSED * self._num_asked)
        self._num_windows = self._num_windows + 1 if overloaded else 0
        self._num_asked = self.num_refused = 0
        self._window_ends = now + WINDOW_S
        was_brief = self.is_reduced
        self.is_reduced = self.reduced_s < self.longest_s and self._num_windows >= NUM_WINDOWS
        return self.is_reduced is not was_brief

    def limit_s(self, turn_s: float) -> float:
        """Return the current limit. A worker starts a request every `turn_s` seconds."""
        return min(self.longest_s, max(self.reduced_s, NUM_TURNS * turn_s)) if self.is_reduced else self.longest_s
