"""A background task that must run as long as its owner."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

log = logging.getLogger(__name__)


class OwnedTask:
    """A task whose early end is a failure. `failure` is the reason, "" while it runs. Not thread-safe."""

    def __init__(self, what: str) -> None:
        """`what`: name in logs, such as "the planner"."""
        self.failure = ""
        self._what = what
        self._task: asyncio.Task[None] | None = None

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Start the task."""
        self._task = asyncio.create_task(work, name=self._what)
        self._task.add_done_callback(self._on_done)

    async def close(self) -> None:
        """Cancel the task and wait for its end."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self.failure = f"{self._what} ended unexpectedly: {task.exception()!r}"
            log.critical("%s", self.failure, exc_info=task.exception())
