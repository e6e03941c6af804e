"""Loads and unloads LoRA adapters on the workers as listed in the operator's file."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Protocol

from common.errors import ModelNotFound, RequestError, Unavailable
from common.machine import OwnedTask
from router.dispatch import Superseded
from router.fleet import Outcome
from router.models import AdapterEntry

log = logging.getLogger(__name__)
LOOK_S = 1.0
"""Polling interval, and delay between attempts while no worker is ready."""
FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 30.0, 960.0
"""Delay in seconds before a refused order is retried, doubled each time: an attempt may make workers read a large
folder or wait for an unresponsive file system."""


class Orders(Protocol):
    """Adapter orders of one model; implemented by `AdapterOrders`."""

    def path_of(self, name: str) -> str: ...
    async def load(self, name: str, path: str, *, in_place: bool) -> Outcome: ...
    async def unload(self, name: str) -> None: ...


class AdapterReconciler:
    """Loads adapters that `entries` list, and unloads those that they no longer list. Owned by one event loop.

    Adapters that endpoints or flags have loaded under other names are not changed. Failed orders are retried with a
    growing delay while the file lists them. `failure` is why the task has ended unexpectedly; "" while it runs.
    """

    def __init__(
        self,
        orders: Mapping[str, Orders],
        entries: Sequence[AdapterEntry],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`orders` maps model names to their adapter orders."""
        self._orders, self._clock = orders, clock
        self._wanted: dict[str, AdapterEntry] = {}
        self._in_force: dict[str, AdapterEntry] = {}
        """Entries that workers have applied, by name."""
        self._not_before: dict[str, float] = {}
        self._backoff_s: dict[str, float] = {}
        self._refused: dict[str, str] = {}
        """The last logged error per name, so that repeated errors are logged once."""
        self._task = OwnedTask("the task that follows the adapter file")
        self.change(entries)

    @property
    def failure(self) -> str:
        """Why the task has ended unexpectedly; "" while it runs."""
        return self._task.failure

    def start(self) -> None:
        """Start the task."""
        self._task.start(self._run())

    def change(self, entries: Sequence[AdapterEntry]) -> None:
        """Replace the entries and reset all retry delays."""
        self._wanted = {entry.name: entry for entry in entries}
        self._not_before.clear()
        self._backoff_s.clear()

    async def close(self) -> None:
        """End the task. Orders that workers have received continue."""
        await self._task.close()

    async def reconcile(self) -> None:
        """Execute all due orders sequentially, because each makes all workers read files."""
        for name, entry in list(self._in_force.items()):
            wanted = self._wanted.get(name)
            if (wanted is None or wanted.model != entry.model) and self._is_due(name):
                await self._attempt(name, self._unload(entry))
        for name, entry in list(self._wanted.items()):
            known = self._in_force.get(name)
            moves = known is not None and known.model != entry.model
            if known != entry and not moves and self._wanted.get(name) is entry and self._is_due(name):
                await self._attempt(name, self._load(entry, known))

    # ------------------------------------------------------------ inside

    async def _run(self) -> None:
        while True:
            await self.reconcile()
            await asyncio.sleep(LOOK_S)

    def _is_due(self, name: str) -> bool:
        return self._clock() >= self._not_before.get(name, 0.0)

    async def _attempt(self, name: str, order: Coroutine[None, None, None]) -> None:
        """Execute an order, or log its error and schedule a retry: soon, if only no worker was ready."""
        try:
            await order
        except Unavailable:
            self._not_before[name] = self._clock() + LOOK_S
        except RequestError as error:
            backoff_s = self._backoff_s.get(name, FIRST_BACKOFF_S)
            self._backoff_s[name] = min(2 * backoff_s, LONGEST_BACKOFF_S)
            self._not_before[name] = self._clock() + backoff_s
            if self._refused.get(name) != error.message:
                self._refused[name] = error.message
                log.error("adapter %s: order failed, will be retried: %s", name, error)
        else:
            self._refused.pop(name, None)
            self._backoff_s.pop(name, None)

    async def _load(self, entry: AdapterEntry, known: AdapterEntry | None) -> None:
        """Load an adapter. `known` is the applied entry of this name. Raises RequestError."""
        orders = self._orders[entry.model]
        is_new_revision = known is not None and known.revision != entry.revision
        if is_new_revision or orders.path_of(entry.name) != entry.path:
            try:
                outcome = await orders.load(entry.name, entry.path, in_place=True)
            except Superseded:
                if orders.path_of(entry.name) != entry.path:
                    raise
            else:
                fields = {"adapter": entry.name, "model": entry.model, "workers": outcome.num_loaded}
                log.info("adapter loaded from the adapter file", extra=fields)
        self._in_force[entry.name] = entry

    async def _unload(self, entry: AdapterEntry) -> None:
        """Unload an adapter. Raises RequestError."""
        orders = self._orders[entry.model]
        if orders.path_of(entry.name) == entry.path:  # otherwise another source has replaced the file's adapter
            try:
                await orders.unload(entry.name)
            except ModelNotFound:
                pass  # another router has unloaded it
            else:
                log.info("adapter unloaded", extra={"adapter": entry.name, "model": entry.model})
        del self._in_force[entry.name]
