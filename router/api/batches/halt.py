"""Why and how a batch stops before its last line."""

from __future__ import annotations

import asyncio
from enum import Enum


class Halted(Enum):
    """`NOT` halted; by its client, by the end of its time, because the router ends, or because another one has it."""

    NOT = "not"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    DRAINING = "draining"
    LOST = "lost"


class Halt:
    """The brakes of one batch. The first reason stays, but for one that leaves the batch to another router."""

    def __init__(self) -> None:
        self.reason = Halted.NOT
        self._no_more, self._abort = asyncio.Event(), asyncio.Event()

    @property
    def stops(self) -> bool:
        """Whether no more lines are begun."""
        return self._no_more.is_set()

    @property
    def aborts(self) -> bool:
        """Whether answers under way are given up."""
        return self._abort.is_set()

    @property
    def leaves(self) -> bool:
        """Whether the rest of the batch is another router's, or another life's of this one."""
        return self.reason in (Halted.DRAINING, Halted.LOST)

    def set(self, reason: Halted, *, abort: bool = False) -> None:
        """Begin no more lines; `abort` those under way as well."""
        if self.reason is Halted.NOT or reason in (Halted.DRAINING, Halted.LOST):
            self.reason = reason
        self._no_more.set()
        if abort:
            self._abort.set()

    async def pause(self, seconds: float) -> None:
        """Wait, but not for longer than until it stops."""
        try:
            async with asyncio.timeout(seconds):
                await self._no_more.wait()
        except TimeoutError:
            pass

    async def aborted(self) -> None:
        """Wait until answers under way are given up."""
        await self._abort.wait()
