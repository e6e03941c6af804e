"""Ranks that are stopped: how rank 0 notices one, and what ends its own wait for one.

A stopped process is neither dead nor there: its sockets stay open, and what waits for it learns only that something
does not come. So each rank gives a sign of life once a second. Signs go the way that steps come, against their
direction.

`torch.distributed` watches no sum that a CUDA graph launches. Where one that was launched by itself takes too long on a
GPU, it aborts the process. So a rank that is stopped would keep rank 0 waiting for tokens without end, or until that:
launched steps have a deadline.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

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


class WaitDeadline:
    """For any thread. Waits may lie within each other."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._waits: dict[object, float] = {}

    @contextlib.contextmanager
    def wait(self) -> Iterator[None]:
        """Around a wait for launched steps."""
        key = object()
        self._waits[key] = time.monotonic()
        try:
            yield
        finally:
            del self._waits[key]

    @property
    def failure(self) -> str:
        """Why no further step can run, "" while there is no reason."""
        since = min(list(self._waits.values()), default=None)
        if since is None or time.monotonic() - since < self._limit_s:
            return ""
        return f"a launched step has not ended within {self._limit_s:g} s: a rank does not come to its sums"
