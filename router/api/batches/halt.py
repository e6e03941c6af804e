"""Reasons and ways to stop a batch before its last line."""

from __future__ import annotations

import asyncio
from enum import Enum


class HaltReason(Enum):
    """Why a batch was halted: by its client, at the end of its window, by shutdown, or because its lease was lost."""

    NOT = "not"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    DRAINING = "draining"
    LOST = "lost"


class HaltSignal:
    """Stop signal of one batch. The first reason is kept, except that `DRAINING` and `LOST` replace others."""

    def __init__(self) -> None:
        self.reason = HaltReason.NOT
        self._no_more, self._abort = asyncio.Event(), asyncio.Event()

    @property
    def stops(self) -> bool:
        """Whether no new lines are started."""
        return self._no_more.is_set()

    @property
    def aborts(self) -> bool:
        """Whether running lines are aborted."""
        return self._abort.is_set()

    @property
    def leaves(self) -> bool:
        """Whether the rest of the batch is left to another router, or to this one after a restart."""
        return self.reason in (HaltReason.DRAINING, HaltReason.LOST)

    def set(self, reason: HaltReason, *, abort: bool = False) -> None:
        """Start no new lines. With `abort`, running lines are aborted too."""
        if self.reason is HaltReason.NOT or reason in (HaltReason.DRAINING, HaltReason.LOST):
            self.reason = reason
        self._no_more.set()
        if abort:
            self._abort.set()

    async def pause(self, seconds: float) -> None:
        """Sleep, but at most until the batch is halted."""
        try:
            async with asyncio.timeout(seconds):
                await self._no_more.wait()
        except TimeoutError:
            pass

    async def aborted(self) -> None:
        """Wait until running lines are aborted."""
        await self._abort.wait()
