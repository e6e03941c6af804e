"""The program `diptych`, which also starts where another distribution has taken the name of a package."""

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
    """End at SIGTERM from the start, until the command installs a handler of its own.

    The first process of a container has no default handlers: a signal that comes while Python imports would be lost,
    and the container would run on until its grace period is over.
    """
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, _end)


def main() -> int:
    """Entry point of the console script: the exit status, unless the command ends the process itself."""
    end_at_sigterm()
    warn_of_foreign_packages()
    status: int = resolve_name(COMMANDS)()
    return status


if __name__ == "__main__":
    sys.exit(main())
