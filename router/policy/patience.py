"""How long a new request may wait: long in a burst, briefly in an overload. Pure.

A burst is admitted whole and waits its turn. In a lasting overload a long queue serves no more requests than a short
one, and each of them has waited as long as it may. The idea is that of controlled delay: how long a queue has been bad
says more than how bad it is (Nichols and Jacobson, "Controlling Queue Delay", ACM Queue 2012; for servers Maurer, "Fail
at Scale", ACM Queue 2015).
"""

from __future__ import annotations

from dataclasses import dataclass

WINDOW_S = 2.0
"""Refused requests and all requests are counted for so long."""
NUM_WINDOWS = 3
"""Overloaded windows in a row that make an overload: a burst and its clients' retries are over by then."""
NUM_REFUSED, SHARE_REFUSED = 3, 0.2
"""An overloaded window refuses at least so many requests, and at least this share of all."""
NUM_TURNS = 3
"""Requests that a short queue has room for: with fewer, workers would be idle between two of them."""


@dataclass(slots=True)
class Patience:
    """`longest_s` is the limit in a burst, `brief_s` that in an overload, though at least `NUM_TURNS` turns."""

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
        """Judge the window if it is over. True when the limit changes."""
        if now < self._window_ends:
            return False
        overloaded = self.num_refused >= max(NUM_REFUSED, SHARE_REFUSED * self._num_asked)
        self._num_windows = self._num_windows + 1 if overloaded else 0
        self._num_asked = self.num_refused = 0
        self._window_ends = now + WINDOW_S
        was_brief = self.is_brief
        self.is_brief = self.brief_s < self.longest_s and self._num_windows >= NUM_WINDOWS
        return self.is_brief is not was_brief

    def limit_s(self, turn_s: float) -> float:
        """How long a request may wait; each one before it takes `turn_s`."""
        return min(self.longest_s, max(self.brief_s, NUM_TURNS * turn_s)) if self.is_brief else self.longest_s
