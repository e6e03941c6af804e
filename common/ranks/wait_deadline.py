"""A deadline for what nothing else watches: a recorded step whose sums another rank never comes to.

`torch.distributed` watches sums that are launched one by one, and none of those that a CUDA graph launches. A rank that
is stopped, and so neither dead nor there, would keep rank 0 waiting for tokens without end.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class WaitDeadline:
    """`wait` is for the thread that launches steps, `failure` for any."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._since: float | None = None

    @contextlib.contextmanager
    def wait(self) -> Iterator[None]:
        """Around a wait for recorded steps."""
        self._since = time.monotonic()
        try:
            yield
        finally:
            self._since = None

    @property
    def failure(self) -> str:
        """Why no further step can run, "" while there is no reason."""
        since = self._since
        if since is None or time.monotonic() - since < self._limit_s:
            return ""
        return f"a recorded step has not ended within {self._limit_s:g} s: a rank does not come to its sums"
