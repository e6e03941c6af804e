"""Child processes: start, supervision, and termination with a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

STOP_TIMEOUT_S = 5.0
"""Time between SIGTERM and SIGKILL, in seconds."""
POLL_INTERVAL_S = 0.05
"""Polling interval for readiness and exit, in seconds."""
NUM_LOG_LINES = 30
"""Number of last log lines shown in an error."""
_PR_SET_PDEATHSIG = 1
"""Option of prctl on Linux."""


def _die_with(parent: int) -> Callable[[], None]:
    """Return a function for the forked child that kills it when `parent` dies. It does nothing outside Linux."""
    if not sys.platform.startswith("linux"):
        return lambda: None
    prctl = ctypes.CDLL(None, use_errno=True).prctl  # looked up before the fork: the child must not import or allocate

    def tie() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died before the call
            os._exit(1)

    return tie


class ChildProcess:
    """A program that may be started repeatedly.

    Its output is appended to `log`, or goes to the parent's output. With `group`, the program runs in its own session,
    and signals reach all processes that it started. With `tied`, Linux kills the program when the thread that launched
    it ends, also if the parent is killed.
    """

    spawn: ClassVar[Callable[..., Any]] = staticmethod(subprocess.Popen)

    def __init__(self, name: str, log: Path | None = None, *, group: bool = False, tied: bool = False) -> None:
        self.name, self.log, self.group, self.tied = name, log, group, tied
        self.started_at = 0.0
        self.forced = False  # the last `wait` had to use SIGKILL
        self._process: subprocess.Popen[bytes] | None = None

    def launch(self, command: Sequence[str], env: Mapping[str, str] | None = None, **options: Any) -> None:
        """Start the program. `options` are those of `subprocess.Popen`. Raises OSError."""
        options = {"start_new_session": self.group, "stdin": subprocess.DEVNULL, "env": env, **options}
        if self.tied:
            options["preexec_fn"] = _die_with(os.getpid())
        if self.log is None:
            self._process = self.spawn(command, **options)
        else:
            with self.log.open("ab") as output:
                self._process = self.spawn(command, stdout=output, stderr=subprocess.STDOUT, **options)
        self.started_at = time.monotonic()

    @property
    def pid(self) -> int:
        assert self._process is not None, f"{self.name} was never started"
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def returncode(self) -> int | None:
        """Exit status, negative for a signal; None while running."""
        return None if self._process is None else self._process.poll()

    def log_tail(self) -> str:
        """Return the last lines of the log."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log and self.log.exists() else []
        return "\n".join(lines[-NUM_LOG_LINES:])

    def describe_end(self) -> str:
        """Describe the exit status with the last lines of the log."""
        return f"{self.name} exited with status {self.returncode}\n{self.log_tail()}"

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process if it runs. A group also receives it if only child processes are left."""
        if self._process is None:
            return
        if self.group:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
        else:
            self._process.send_signal(number)

    def terminate(self) -> None:
        """Request termination, also of a stopped process."""
        self.send_signal(signal.SIGTERM)
        self.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Send SIGKILL and wait for the exit."""
        self.send_signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()

    def wait(self, deadline: float) -> None:
        """Wait for the exit until `deadline` (monotonic seconds), then kill the process and set `forced`."""
        if self._process is None:
            return
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
            self.forced = False
        except subprocess.TimeoutExpired:
            self.forced = True
        if self.forced or self.group:  # its child processes may outlive it
            self.kill()

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Request termination, and kill the process after `timeout_s`."""
        self.terminate()
        self.wait(time.monotonic() + timeout_s)

    async def ended(self) -> int:
        """Wait for the exit of the current process and return its status."""
        process = self._process
        assert process is not None, f"{self.name} was never started"
        while (status := process.poll()) is None:  # noqa: ASYNC110 (no event without a thread)
            await asyncio.sleep(POLL_INTERVAL_S)
        return status
