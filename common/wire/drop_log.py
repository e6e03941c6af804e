"""Says that frames are dropped without a line for each: a thawed process finds thousands of them at once."""

from __future__ import annotations

import logging

EVERY_S = 1.0


class DropLog:
    """Counts dropped frames. The first one is logged at once, what follows within EVERY_S is told in one line.

    `what` says what is dropped, such as "a control frame". `flush` must be called now and then: it tells the rest.
    """

    def __init__(self, log: logging.Logger, what: str) -> None:
        self._log, self._what = log, what
        self._told_at = float("-inf")
        self._num_untold = 0
        self._last = ""
        self.num_dropped = 0

    def add(self, why: str, now: float) -> None:
        """A frame was dropped."""
        self.num_dropped += 1
        self._num_untold += 1
        self._last = why
        self.flush(now)

    def flush(self, now: float) -> None:
        """Tell what was held back, unless a line was written less than EVERY_S ago."""
        if not self._num_untold or now - self._told_at < EVERY_S:
            return
        if self._num_untold == 1:
            self._log.warning("dropped %s: %s", self._what, self._last)
        else:
            self._log.warning("dropped %s %d times, last: %s", self._what, self._num_untold, self._last)
        self._told_at, self._num_untold = now, 0
