"""A program that a test starts and whose output it reads."""

from __future__ import annotations

import time
from pathlib import Path

from common.machine.child_process import ChildProcess

POLL_S = 0.02


class Program(ChildProcess):
    """A child process with a log. The fixture `launch` starts one, and kills it after the test."""

    log: Path

    def output(self) -> str:
        """All that it has printed so far."""
        return self.log.read_text(errors="replace")

    def wait_for_line(self, word: str, timeout_s: float = 60.0) -> str:
        """The first whole line of its output with this word. Fails with the output when there is none in time."""
        deadline = time.monotonic() + timeout_s
        while True:
            may_go_on = self.alive and time.monotonic() < deadline  # asked first: its last words count
            for line in self.output().splitlines(keepends=True):
                if word in line and line.endswith("\n"):
                    return line.strip()
            assert may_go_on, f"{self.name} has not printed {word!r}\n{self.output()}"
            time.sleep(POLL_S)
