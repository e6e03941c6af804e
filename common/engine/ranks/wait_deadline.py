"""A deadline for what nothing else watches: launched steps whose sums another rank never comes to.

`torch.distributed` watches no sum that a CUDA graph launches. Where one that was launched by itself takes too long on a
GPU, it aborts the process. So a rank that is stopped, and neither dead nor there, would keep rank 0 waiting for tokens
without end, or until that.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class WaitDeadline:
    """For any thread. Waits may lie within each other."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._waits: dict[object, float] = {}

    @contextlib.contextmanager
    def wait(self) -> Iterator[None]:
        """Around a wait for launched steps."""
        key = object()
        self._waits[key] = time.monotonic()
        try:
            yield
        finally:
            del self._waits[key]

    @property
    def failure(self) -> str:
        """Why no further step can run, "" while there is no reason."""
        since = min(list(self._waits.values()), default=None)
        if since is None or time.monotonic() - since < self._limit_s:
            return ""
        return f"a launched step has not ended within {self._limit_s:g} s: a rank does not come to its sums"
