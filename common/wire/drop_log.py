"""Logs dropped frames without a line for each: a process that was frozen finds thousands of them at once."""

from __future__ import annotations

import logging

EVERY_S = 1.0
"""A flood of bad frames makes a line in so many seconds."""


class DropLog:
    """Counts dropped frames. Logs the first one at once, and those of the next EVERY_S seconds in one line.

    `what` names them, such as "a control frame". The owner calls `flush` now and then to log what is left.
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
        """Log what was held back, unless the last line is less than EVERY_S seconds old."""
        if not self._num_untold or now - self._told_at < EVERY_S:
            return
        if self._num_untold == 1:
            self._log.warning("dropped %s: %s", self._what, self._last)
        else:
            self._log.warning("dropped %s %d times, last: %s", self._what, self._num_untold, self._last)
        self._told_at, self._num_untold = now, 0
