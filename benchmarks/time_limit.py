"""Ends a measurement that takes too long, or gets SIGTERM, while there is time to report its results."""

from __future__ import annotations

import faulthandler
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

GRACE_S = 30.0
"""Seconds for the clean-up. Then faulthandler ends the process, because no exception interrupts a hanging driver."""
STDERR = 2
"""File descriptor for the traceback of that end: `sys.stderr` may be an object without one."""


class TimeOver(KeyboardInterrupt):
    """The time limit has come, or SIGTERM. Not an Exception, so that no part takes it for its own failure."""


@contextmanager
def time_limit(seconds: float, grace_s: float = GRACE_S) -> Iterator[None]:
    """Raise TimeOver in the block once, after `seconds` (0: never) or at SIGTERM. Main thread only.

    If the block is not left within `grace_s` seconds of that, the process is ended.
    """
    numbers = (signal.SIGALRM, signal.SIGTERM)

    def stop(number: int, _: FrameType | None) -> None:
        for other in numbers:
            signal.signal(other, signal.SIG_IGN)
        faulthandler.dump_traceback_later(grace_s, exit=True, file=STDERR)
        raise TimeOver(f"the limit of {seconds:g} s" if number == signal.SIGALRM else "told to end")

    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        if seconds:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            faulthandler.dump_traceback_later(seconds + grace_s, exit=True, file=STDERR)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
        for number, handler in before.items():
            signal.signal(number, handler)
