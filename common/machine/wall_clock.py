"""The wall-clock time, and bounds on it that hold while the clock may be wrong.

The wall clock jumps when a time server corrects or misleads it, or when the battery of the hardware clock is empty.
Expiry by a jump may be years early, and deleted data does not return when the clock is corrected. So expiry times are
compared with a bound: the earliest current time according to any offset of the last hour. An offset is the difference
between the wall clock and the boot-time clock, which cannot be set and also counts suspended time. After a suspension,
data therefore expires at once; after a jump, it expires an hour later.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

log = logging.getLogger(__name__)
JUMP_S = 5.0
"""Minimum change of the offset, in seconds, that counts as a jump. Time servers regularly make smaller corrections."""
AGES_S = 3600.0
"""Seconds after a jump until ages are measured by the new time."""
LEASES_S = 30.0
"""The same for leases, which their owners renew every few seconds."""
MAX_SETTINGS = 4096
"""Maximum number of stored offsets. Bounds the memory if the clock jumps at every reading."""


def seconds_of_machine() -> float:
    """Seconds of a clock that cannot be set. Includes suspended time if the system counts it."""
    return time.monotonic() if _BOOT_CLOCK is None else time.clock_gettime(_BOOT_CLOCK)


def _boot_clock() -> int | None:
    clock = getattr(time, "CLOCK_BOOTTIME", None)  # missing in some Linux sandboxes
    try:
        if clock is not None:
            time.clock_gettime(clock)
    except OSError:
        return None
    return clock


_BOOT_CLOCK = _boot_clock()


class WallClock:
    """Seconds since the epoch. Thread-safe."""

    def __init__(
        self, wall: Callable[[], float] = time.time, machine: Callable[[], float] = seconds_of_machine
    ) -> None:
        self._wall, self._machine = wall, machine
        self._lock = threading.Lock()
        self._setting = wall() - machine()
        self._former: deque[tuple[float, float]] = deque(maxlen=MAX_SETTINGS)
        """Replaced offsets, each with the boot-time clock at its replacement."""

    def now(self) -> float:
        """Return the wall clock."""
        return self._wall()

    def earliest(self, doubt_s: float) -> float:
        """Return the earliest time by the offsets of the last `doubt_s` seconds: `now`, except after a jump ahead."""
        machine, settings = self._look(doubt_s)
        return machine + min(settings)

    def latest(self, doubt_s: float) -> float:
        """Return the latest time by the offsets of the last `doubt_s` seconds: `now`, except after a jump back."""
        machine, settings = self._look(doubt_s)
        return machine + max(settings)

    def observe(self, stamp: float) -> None:
        """Record that this machine's clock once showed `stamp`. If it is past, the clock may have jumped since then."""
        with self._lock:
            machine = self._machine()
            if stamp < self._wall() - JUMP_S:
                self._former.append((machine - LEASES_S, stamp - machine))

    def _look(self, doubt_s: float) -> tuple[float, list[float]]:
        """Return the boot-time clock and the offsets of the last `doubt_s` seconds."""
        with self._lock:
            machine = self._machine()
            setting = self._wall() - machine
            jump = setting - self._setting
            if abs(jump) > JUMP_S:
                self._former.append((machine, self._setting))
            self._setting = setting
            former = [one for until, one in self._former if machine - until < doubt_s]
        if abs(jump) > JUMP_S:
            log.warning(
                "the wall clock jumped by %+.0f s: the new time expires nothing for %.0f s",
                *(jump, AGES_S),
            )
        return machine, [setting, *former]


WALL_CLOCK = WallClock()
"""Clock of this process."""
