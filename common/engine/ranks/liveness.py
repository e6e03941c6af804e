"""Detection of stopped ranks by rank 0, and the deadlines of its waits for them.

A stopped process keeps its sockets open, so its peers notice only silence. Each rank therefore sends a heartbeat
once per second, on the channel of steps in the reverse direction.

`torch.distributed` does not watch collectives launched by a CUDA graph, so a stopped rank would keep rank 0 waiting
forever; for others on a GPU, it aborts the process after a timeout. Launched steps therefore have a deadline.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from common.engine.ranks.channel import Channel

HEARTBEAT_S = 1.0
SILENT_S = 60.0
"""Silence, in seconds, after which the worker stops: the timeout of a collective."""
SUSPECT_SILENCE_S = 5.0
"""Silence, in seconds, after which a rank is named in other failures."""
LOOK_S = 5.0
"""Maximum silence counted between two checks, in seconds, because rank 0 may have been stopped itself."""
HEARTBEAT = b"\1"


def send_heartbeats(channel: Channel) -> None:
    """Send heartbeats until rank 0 is gone. Runs on a separate thread of a rank."""
    while not channel.is_cut(HEARTBEAT_S):
        channel.try_send(HEARTBEAT)


class HeartbeatMonitor:
    """Rank 0's view of a rank's heartbeats. Thread-safe."""

    def __init__(self, channel: Channel, clock: Callable[[], float] = time.monotonic) -> None:
        self._channel, self._clock = channel, clock
        self._lock = threading.Lock()
        self._looked_at: float | None = None
        self._silent_s = 0.0

    def silent_s(self) -> float:
        """Return the time without a heartbeat since the first call, in seconds."""
        with self._lock:
            now = self._clock()
            since = 0.0 if self._looked_at is None else now - self._looked_at
            self._looked_at = now
            self._silent_s = 0.0 if self._channel.drain() else self._silent_s + min(since, LOOK_S)
            return self._silent_s


class WaitDeadline:
    """Deadline of waits for launched steps. Thread-safe. Waits may be nested."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._waits: dict[object, float] = {}

    @contextlib.contextmanager
    def wait(self) -> Iterator[None]:
        """Context of a wait for launched steps."""
        key = object()
        self._waits[key] = time.monotonic()
        try:
            yield
        finally:
            del self._waits[key]

    @property
    def failure(self) -> str:
        """Reason why no further step can run, or ""."""
        since = min(list(self._waits.values()), default=None)
        if since is None or time.monotonic() - since < self._limit_s:
            return ""
        return f"a launched step did not complete within {self._limit_s:g} s: a rank did not reach its collectives"
