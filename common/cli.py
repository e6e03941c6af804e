"""The program `diptych`. Starts even if another distribution has installed a package of the same name."""

from __future__ import annotations

import os
import signal
import sys
from pkgutil import resolve_name
from types import FrameType

from common.packages import warn_of_foreign_packages

COMMANDS = "router.cli.main:main"


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)


def end_at_sigterm() -> None:
    """Exit at SIGTERM until the command installs its own handler.

    The first process of a container has no default handlers. A signal during the imports would be lost, and the
    container would keep running until its grace period ends.
    """
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, _end)


def open_closed_streams() -> None:
    """Open /dev/null in place of each standard stream that the caller has closed, as in `diptych ls >&-`.

    Otherwise the stream is None, and the descriptor goes to the next file or socket that is opened.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)  # the lowest that is free: that of the stream
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, mode))


def main() -> int:
    """Run the command and return its exit status, unless it ends the process itself."""
    open_closed_streams()
    end_at_sigterm()
    warn_of_foreign_packages()
    status: int = resolve_name(COMMANDS)()
    return status


if __name__ == "__main__":
    sys.exit(main())
