"""Console script `diptych`. It also starts if another distribution has a package with the same name as ours."""

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

    The first process of a container has no default handlers, so a signal during imports would be lost and the container
    would run until the end of its grace period.
    """
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, _end)


def main() -> int:
    """Run the command. Returns the exit status, unless the command ends the process itself."""
    end_at_sigterm()
    warn_of_foreign_packages()
    status: int = resolve_name(COMMANDS)()
    return status


if __name__ == "__main__":
    sys.exit(main())
