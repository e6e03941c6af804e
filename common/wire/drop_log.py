"""Rate-limited log of dropped frames. A process that was suspended may find thousands of them at once."""

from __future__ import annotations

import logging

EVERY_S = 1.0
"""Interval of log lines in a flood of invalid frames, in seconds."""


class DropLog:
    """Counts dropped frames. Logs the first one immediately, and those of the next `EVERY_S` seconds in one line.

    `what` describes them, such as "a control frame". The owner calls `flush` periodically to log the remaining ones.
    """

    def __init__(self, log: logging.Logger, what: str) -> None:
        self._log, self.what = log, what
        self._logged_at = float("-inf")
        self._num_unlogged = 0
        self._last = ""
        self.num_dropped = 0

    def add(self, why: str, now: float) -> None:
        """Count a dropped frame."""
        self.num_dropped += 1
        self._num_unlogged += 1
        self._last = why
        self.flush(now)

    def flush(self, now: float) -> None:
        """Log unlogged frames, unless the last line is less than `EVERY_S` seconds old."""
        if not self._num_unlogged or now - self._logged_at < EVERY_S:
            return
        if self._num_unlogged == 1:
            self._log.warning("dropped %s: %s", self.what, self._last)
        else:
            self._log.warning("dropped %s %d times, last: %s", self.what, self._num_unlogged, self._last)
        self._logged_at, self._num_unlogged = now, 0
