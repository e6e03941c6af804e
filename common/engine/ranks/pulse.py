"""A sign of life of each rank, once a second, by which rank 0 notices and names one that is stopped.

A stopped process is neither dead nor there: its sockets stay open, and what waits for it learns only that something
does not come. Signs go the way that steps come, against their direction.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from common.engine.ranks.channel import Channel

PULSE_S = 1.0
SILENT_S = 60.0
"""After so long a silence the worker ends: as long as a rank waits in a sum."""
QUIET_S = 5.0
"""After so long a silence a rank is named where something else failed."""
LOOK_S = 5.0
"""Of the time since rank 0 last looked so much counts at most: it may have been stopped itself."""
SIGN = b"\1"


def give_pulse(channel: Channel) -> None:
    """A rank's side, on a thread of its own, until rank 0 is gone."""
    while not channel.is_cut(PULSE_S):
        channel.try_send(SIGN)


class SignsOfLife:
    """Rank 0's side. For any thread."""

    def __init__(self, channel: Channel, clock: Callable[[], float] = time.monotonic) -> None:
        self._channel, self._clock = channel, clock
        self._lock = threading.Lock()
        self._looked_at: float | None = None
        self._silent_s = 0.0

    def silent_s(self) -> float:
        """How long no sign has come since the first call, as far as rank 0 has looked for one."""
        with self._lock:
            now = self._clock()
            since = 0.0 if self._looked_at is None else now - self._looked_at
            self._looked_at = now
            self._silent_s = 0.0 if self._channel.drain() else self._silent_s + min(since, LOOK_S)
            return self._silent_s
