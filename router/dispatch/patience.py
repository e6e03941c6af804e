"""How long a new request may wait: long while load comes in bursts, briefly while more comes than can be served. Pure.

A burst is taken in whole and waits its turn. Where requests must be refused all the same, and go on coming, a long
queue helps nobody: as many are served as through a short one, and each has waited as long as it may. The idea is that
of controlled delay: how long a queue has been bad tells more than how bad it is (Nichols and Jacobson, "Controlling
Queue Delay", ACM Queue 2012; for servers Maurer, "Fail at Scale", ACM Queue 2015).
"""

from __future__ import annotations

from dataclasses import dataclass

WINDOW_S = 2.0
NUM_WINDOWS = 3
"""So many windows in a row with refusals are no burst, nor what its clients send again."""
NUM_REFUSED = 3
SHARE_REFUSED = 0.2
"""In a window of an overload, at least so many requests and this share of all are refused."""
NUM_TURNS = 3
"""A short queue has room for so many requests: with less, workers would fall idle between two of them."""


@dataclass(slots=True)
class Patience:
    """`longest_s` is the limit of a burst, `brief_s` that of an overload, though never less than three turns."""

    longest_s: float
    brief_s: float
    is_brief: bool = False
    num_refused: int = 0  # in this window so far
    _num_asked: int = 0
    _num_windows: int = 0
    _window_ends: float = 0.0

    def count(self, *, refused: bool) -> None:
        """A request was taken or refused."""
        self._num_asked += 1
        self.num_refused += refused

    def tick(self, now: float) -> bool:
        """Look back when a window is over; whether patience has changed."""
        if now < self._window_ends:
            return False
        is_over = self.num_refused >= max(NUM_REFUSED, SHARE_REFUSED * self._num_asked)
        self._num_windows = self._num_windows + 1 if is_over else 0
        self._num_asked = self.num_refused = 0
        self._window_ends = now + WINDOW_S
        was_brief = self.is_brief
        self.is_brief = self.brief_s < self.longest_s and self._num_windows >= NUM_WINDOWS
        return self.is_brief is not was_brief

    def limit_s(self, turn_s: float) -> float:
        """How long a request may wait; each one before it takes `turn_s`."""
        return min(self.longest_s, max(self.brief_s, NUM_TURNS * turn_s)) if self.is_brief else self.longest_s
