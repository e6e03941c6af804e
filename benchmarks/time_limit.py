"""An end for a measurement that takes too long: of its own accord, while there is time to say what was found."""

from __future__ import annotations

import faulthandler
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

GRACE_S = 30.0
"""For ending what was started. What is stuck in the driver by then, where no exception reaches, is ended by force."""


class TimeOver(KeyboardInterrupt):
    """The time limit has come, or somebody wants the process to end. Nothing on the way takes it for a failure."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeOver in here, once: `seconds` from now (0: never), or at SIGTERM. For the main thread."""
    numbers = (signal.SIGALRM, signal.SIGTERM)

    def stop(number: int, _: FrameType | None) -> None:
        for other in numbers:
            signal.signal(other, signal.SIG_IGN)
        raise TimeOver(f"the limit of {seconds:g} s" if number == signal.SIGALRM else "told to end")

    before = {number: signal.signal(number, stop) for number in numbers}
    if seconds:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        faulthandler.dump_traceback_later(seconds + GRACE_S, exit=True)
    try:
        yield
    finally:
        if seconds:
            signal.setitimer(signal.ITIMER_REAL, 0)
            faulthandler.cancel_dump_traceback_later()
        for number, handler in before.items():
            signal.signal(number, handler)
