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


def main() -> int:
    """Run the command and return its exit status, unless it ends the process itself."""
    end_at_sigterm()
    warn_of_foreign_packages()
    status: int = resolve_name(COMMANDS)()
    return status


if __name__ == "__main__":
    sys.exit(main())
