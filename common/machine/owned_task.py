"""A task that runs for as long as its owner does, and whose end before that is a failure of the process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

log = logging.getLogger(__name__)


class OwnedTask:
    """`failure`: why it has ended although it never should; "" while it runs. Belongs to one event loop."""

    def __init__(self, what: str) -> None:
        """`what` it is, for people: "the planner"."""
        self.failure = ""
        self._what = what
        self._task: asyncio.Task[None] | None = None

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` from now on."""
        self._task = asyncio.create_task(work, name=self._what)
        self._task.add_done_callback(self._on_done)

    async def close(self) -> None:
        """End it, and wait for its end."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self.failure = f"{self._what} ended: {task.exception()!r}"
            log.critical("%s", self.failure, exc_info=task.exception())
