"""The time of day, and bounds of it that hold while the wall clock may be wrong.

A wall clock jumps when a time server corrects it, or misleads it, and when the battery of a machine's clock is dead.
What would expire by a jump may be years from its time, and what is deleted does not come back when the clock does. So a
time by which something expires is compared with a bound: the least time that any of the clock's settings of the last
hour stands for. Each setting is the difference between the wall clock and a clock that no one sets, and which counts
time in suspension as well. A machine that slept therefore expires what is due; after a jump that takes an hour.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

log = logging.getLogger(__name__)
JUMP_S = 5.0
"""A larger difference between two looks is a jump; time servers correct smaller ones all the time."""
AGES_S = 3600.0
"""How long the clock must run on after a jump before ages are measured by its new time."""
LEASES_S = 30.0
"""The same for leases, which their owners renew every few seconds by the new time."""
MAX_SETTINGS = 4096
"""Bounds the memory for a clock that jumps at every look."""


def seconds_of_machine() -> float:
    """Seconds since some time, suspensions included where the system counts them. Nobody can set this clock."""
    return time.monotonic() if _BOOT_CLOCK is None else time.clock_gettime(_BOOT_CLOCK)


def _boot_clock() -> int | None:
    clock = getattr(time, "CLOCK_BOOTTIME", None)  # Linux has it, some sandboxes do not
    try:
        if clock is not None:
            time.clock_gettime(clock)
    except OSError:
        return None
    return clock


_BOOT_CLOCK = _boot_clock()


class WallClock:
    """Seconds since the epoch. For any thread."""

    def __init__(
        self, wall: Callable[[], float] = time.time, machine: Callable[[], float] = seconds_of_machine
    ) -> None:
        self._wall, self._machine = wall, machine
        self._lock = threading.Lock()
        self._setting = wall() - machine()
        self._former: deque[tuple[float, float]] = deque(maxlen=MAX_SETTINGS)
        """Settings that were replaced, with the time of the machine until which each was in force."""

    def now(self) -> float:
        """What the wall clock says."""
        return self._wall()

    def earliest(self, doubt_s: float) -> float:
        """The least time that a setting of the last `doubt_s` seconds stands for: `now`, but after a jump ahead."""
        machine, settings = self._look(doubt_s)
        return machine + min(settings)

    def latest(self, doubt_s: float) -> float:
        """The greatest time that a setting of the last `doubt_s` seconds stands for: `now`, but after a jump back."""
        machine, settings = self._look(doubt_s)
        return machine + max(settings)

    def saw(self, stamp: float) -> None:
        """A clock of this machine once said `stamp`. If that is past, the time since may be a jump: ages doubt it."""
        with self._lock:
            machine = self._machine()
            if stamp < self._wall() - JUMP_S:
                self._former.append((machine - LEASES_S, stamp - machine))

    def _look(self, doubt_s: float) -> tuple[float, list[float]]:
        """The machine's time, and the settings of the last `doubt_s` seconds."""
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
                "the wall clock jumped by %+.0f s: nothing expires by the new time before it has held for %.0f s",
                *(jump, AGES_S),
            )
        return machine, [setting, *former]


WALL_CLOCK = WallClock()
"""The process's."""
