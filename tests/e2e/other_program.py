"""A worker of a stack runs another program for a while: one of those here that hang or die."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.stack import Stack, StackProcess


def run_instead(worker: StackProcess, script: str, *argv: str) -> None:
    """From its next start on the worker runs a script of this folder, with `argv` and then its own flags."""
    flags = worker.command[worker.command.index("-m") + 2 :]
    worker.command = [sys.executable, "-P", str(Path(__file__).with_name(script)), *argv, *flags]


@contextmanager
def running_instead(stack: Stack, worker: StackProcess, script: str, *argv: str) -> Iterator[None]:
    """Killed and started as the script; at the end killed and started as itself."""
    command = worker.command
    worker.kill()
    run_instead(worker, script, *argv)
    stack.restart(worker)
    try:
        yield
    finally:
        worker.kill()
        worker.command = command
        stack.restart(worker)
