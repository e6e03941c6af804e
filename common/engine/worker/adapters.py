"""Adapters of a worker by name: loaded from flags at startup, then as ordered by routers.

SetAdapter ─> loading ─┬─> loaded ── SetAdapter without a path ──> unloaded
                       └─> failed     (slots are freed once no sequence uses them)
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress

from msgspec.structs import replace

from common.engine.worker.contract import AdapterStore, LoadedAdapter
from common.errors import ModelError
from common.wire.messages import FLAG_VERSION, MAX_ADAPTERS, AdapterState, SetAdapter

log = logging.getLogger(__name__)
MAX_SHOWN_REASON = 500
"""Maximum length, in characters, of the reason why an adapter could not be loaded."""
CLOSE_S = 2.0
"""Maximum time, in seconds, that `close` waits for a load in progress."""


class WorkerAdapters:
    """Adapter registry, used on the event loop. Calls `on_change` on state changes, to notify routers immediately."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self._store: AdapterStore | None = None
        self._states: dict[str, AdapterState] = {}
        self._waiting: dict[str, SetAdapter] = {}
        self._loading: asyncio.Task[None] | None = None

    @property
    def states(self) -> tuple[AdapterState, ...]:
        """States of all adapters that the worker has been ordered to load or unload."""
        return tuple(self._states.values())

    @property
    def names(self) -> Mapping[str, str]:
        """Names of loaded adapters, by digest."""
        return {state.digest: state.name for state in self._states.values() if state.status == "loaded"}

    async def load_flags(self, store: AdapterStore, named: Sequence[str]) -> None:
        """Load the adapters of `--lora`, given as NAME=PATH. Raises ModelError if one is invalid."""
        self._store = store
        for one in named:
            name, _, path = one.partition("=")
            self._states[name] = AdapterState(name, FLAG_VERSION, "loading", path)
            try:
                await self._load(store, self._states[name])
            except ModelError as error:
                raise ModelError(f"--lora {name}: {error}") from error

    def order(self, order: SetAdapter) -> None:
        """Execute a router's order unless a newer one was received."""
        known = self._states.get(order.name)
        if self._store is None or (known is not None and known.version >= order.version):
            return
        before = known.digest if known is not None else ""
        if order.path:
            log.info("adapter %s: loading from %s", order.name, order.path)
            self._states[order.name] = AdapterState(order.name, order.version, "loading", order.path)
            self._waiting[order.name] = order
            if self._loading is None or self._loading.done():
                self._loading = asyncio.create_task(self._load_waiting(self._store), name="load adapters")
        else:
            log.info("adapter %s: unloading", order.name)
            self._states[order.name] = AdapterState(order.name, order.version, "unloaded")
            self._waiting.pop(order.name, None)
        self._retire(before)
        self._forget()
        self._on_change()

    async def loaded(self) -> None:
        """Wait until all ordered adapters were loaded or have failed."""
        if self._loading is not None:
            await asyncio.wait({self._loading})

    async def close(self) -> None:
        """Stop loading. Waits up to `CLOSE_S` for a load in progress, then abandons it."""
        self._waiting.clear()
        if self._loading is not None:
            await asyncio.wait({self._loading}, timeout=CLOSE_S)
            self._loading.cancel()

    async def _load_waiting(self, store: AdapterStore) -> None:
        """Load the ordered adapters sequentially."""
        while self._waiting:
            name = next(iter(self._waiting))
            order = self._waiting.pop(name)
            state = self._states.get(name)
            if state is None or state.version != order.version:
                continue
            try:
                await self._load(store, state)
            except Exception as error:  # whatever the error, the worker continues without the adapter
                why = str(error) if isinstance(error, ModelError) else f"{type(error).__name__}: {error}"
                log.warning("adapter %s: loading failed: %s", name, why)
                if self._states.get(name) is state:
                    self._states[name] = replace(state, status="failed", message=why[:MAX_SHOWN_REASON])
            self._on_change()

    async def _load(self, store: AdapterStore, state: AdapterState) -> None:
        held = await asyncio.wrap_future(_begin_load(store, state))
        if self._states.get(state.name) is state:
            self._states[state.name] = replace(
                state, status="loaded", digest=held.digest, rank=held.rank, num_bytes=held.num_bytes
            )
        else:  # superseded by a newer order
            self._retire(held.digest)

    def _retire(self, digest: str) -> None:
        """Free an adapter that no name refers to, once no sequence uses it."""
        if digest and self._store is not None and digest not in self.names:
            self._store.retire(digest)

    def _forget(self) -> None:
        """Limit the number of names by dropping the oldest unloaded and failed ones."""
        gone = [state for state in self._states.values() if state.status in ("unloaded", "failed")]
        for state in sorted(gone, key=lambda one: one.version)[: max(0, len(self._states) - MAX_ADAPTERS)]:
            del self._states[state.name]


def _begin_load(store: AdapterStore, state: AdapterState) -> Future[LoadedAdapter]:
    """Load on a daemon thread. Process exit would wait for `asyncio.to_thread` threads, which may hang."""
    result: Future[LoadedAdapter] = Future()

    def load() -> None:
        with suppress(InvalidStateError):  # the caller was cancelled
            try:
                result.set_result(store.load(state.name, state.path))
            except Exception as error:
                result.set_exception(error)

    threading.Thread(target=load, name="load-adapter", daemon=True).start()
    return result
