"""Progress of long reads: a bar if the process has the terminal to itself, otherwise log lines.

weights: 3.1 of 16.0 GB read
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import NoReturn

from tqdm import tqdm

PROGRESS_EVERY_S = 10.0
"""Interval of log lines, in seconds."""
SMALL_BYTES = 10**8
"""Smaller sizes are shown in MB."""


def in_bytes(count: int) -> str:
    """Format a size in megabytes or gigabytes."""
    return f"{count / 1e6:.1f} MB" if count < SMALL_BYTES else f"{count / 1e9:.1f} GB"


def has_terminal() -> bool:
    """Return whether stderr is a terminal and this process runs in its foreground.

    False for processes started by `diptych serve`, whose bars would overwrite each other.
    """
    try:
        return os.tcgetpgrp(sys.stderr.fileno()) == os.getpgrp()
    except (OSError, ValueError):
        return False


class ByteProgress:
    """Counts bytes up to `total`: "`what`: 3.1 of 16.0 GB `done`". A context manager for one thread."""

    def __init__(
        self,
        what: str,
        done: str,
        total: int,
        log: logging.Logger,
        *,
        bar: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`bar`: show a bar instead of log lines; None: if the process has the terminal to itself."""
        self.what, self.done, self.total = what, done, total
        self.count = 0
        self._log, self._clock = log, clock
        self._began = self._reported = clock()
        self._shows_bar = has_terminal() if bar is None else bar
        self._bar: tqdm[NoReturn] = tqdm(
            total=total, unit="B", unit_scale=True, desc=f"{what} {done}", disable=not self._shows_bar, leave=False
        )

    def add(self, num_bytes: int) -> None:
        """Add `num_bytes` to the count."""
        num_bytes = min(num_bytes, self.total - self.count)
        self.count += num_bytes
        self._bar.update(num_bytes)
        now = self._clock()
        if not self._shows_bar and now - self._reported >= PROGRESS_EVERY_S:
            self._reported = now
            whole = in_bytes(self.total)
            unit = 1e6 if whole.endswith("MB") else 1e9
            self._log.info("%s: %.1f of %s %s", self.what, self.count / unit, whole, self.done)

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._began

    def __enter__(self) -> ByteProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
