"""The adapters of a worker by name: loaded from flags at its start, then as routers order. Owns the names.

SetAdapter ─> loading ─┬─> loaded ── SetAdapter without a path ──> unloaded
                       └─> failed     (places are freed once no sequence uses them)
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import TYPE_CHECKING

from msgspec.structs import replace

from common.errors import ModelError
from common.wire.messages import FLAG_VERSION, MAX_ADAPTERS, AdapterState, SetAdapter

if TYPE_CHECKING:  # torch
    from common.engine.adapters import AdapterBank, HeldAdapter

log = logging.getLogger(__name__)
MAX_SHOWN_REASON = 500
"""Characters of why an adapter could not be loaded."""
CLOSE_S = 2.0
"""Maximum time, in seconds, that `close` waits for a load in progress."""


class WorkerAdapters:
    """Belongs to the event loop. `on_change` is called when a state has changed, so that routers hear of it at once."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self._bank: AdapterBank | None = None
        self._states: dict[str, AdapterState] = {}
        self._waiting: dict[str, SetAdapter] = {}
        self._loading: asyncio.Task[None] | None = None

    @property
    def states(self) -> tuple[AdapterState, ...]:
        """All names that the worker was told of."""
        return tuple(self._states.values())

    @property
    def names(self) -> Mapping[str, str]:
        """Names by the digests that they stand for."""
        return {state.digest: state.name for state in self._states.values() if state.status == "loaded"}

    async def load_flags(self, bank: AdapterBank, named: Sequence[str]) -> None:
        """Begin with the adapters of `--lora`, as NAME=PATH. Raises ModelError for one that is refused."""
        self._bank = bank
        for one in named:
            name, _, path = one.partition("=")
            self._states[name] = AdapterState(name, FLAG_VERSION, "loading", path)
            try:
                await self._load(bank, self._states[name])
            except ModelError as error:
                raise ModelError(f"--lora {name}: {error}") from error

    def order(self, order: SetAdapter) -> None:
        """Carry out a router's order, unless a newer one is known."""
        known = self._states.get(order.name)
        if self._bank is None or (known is not None and known.version >= order.version):
            return
        before = known.digest if known is not None else ""
        if order.path:
            log.info("loads adapter %s from %s", order.name, order.path)
            self._states[order.name] = AdapterState(order.name, order.version, "loading", order.path)
            self._waiting[order.name] = order
            if self._loading is None or self._loading.done():
                self._loading = asyncio.create_task(self._load_waiting(self._bank), name="load adapters")
        else:
            log.info("unloads adapter %s", order.name)
            self._states[order.name] = AdapterState(order.name, order.version, "unloaded")
            self._waiting.pop(order.name, None)
        self._retire(before)
        self._forget()
        self._on_change()

    async def loaded(self) -> None:
        """Wait until all that was ordered is loaded, or was refused."""
        if self._loading is not None:
            await asyncio.wait({self._loading})

    async def close(self) -> None:
        """Stop loading. Waits up to `CLOSE_S` for a load in progress, then abandons it."""
        self._waiting.clear()
        if self._loading is not None:
            await asyncio.wait({self._loading}, timeout=CLOSE_S)
            self._loading.cancel()

    async def _load_waiting(self, bank: AdapterBank) -> None:
        """Load what was ordered, one after the other."""
        while self._waiting:
            name = next(iter(self._waiting))
            order = self._waiting.pop(name)
            state = self._states.get(name)
            if state is None or state.version != order.version:
                continue
            try:
                await self._load(bank, state)
            except Exception as error:  # whatever it was, the worker serves on without the adapter
                why = str(error) if isinstance(error, ModelError) else f"{type(error).__name__}: {error}"
                log.warning("adapter %s is not loaded: %s", name, why)
                if self._states.get(name) is state:
                    self._states[name] = replace(state, status="failed", message=why[:MAX_SHOWN_REASON])
            self._on_change()

    async def _load(self, bank: AdapterBank, state: AdapterState) -> None:
        held = await asyncio.wrap_future(_begin_load(bank, state))
        if self._states.get(state.name) is state:
            self._states[state.name] = replace(
                state, status="loaded", digest=held.digest, rank=held.rank, num_bytes=held.num_bytes
            )
        else:  # a newer order came meanwhile
            self._retire(held.digest)

    def _retire(self, digest: str) -> None:
        """Free an adapter that no name stands for any more, once no sequence uses it."""
        if digest and self._bank is not None and digest not in self.names:
            self._bank.retire(digest)

    def _forget(self) -> None:
        """Bound the names: of those that stand for nothing, the oldest go first."""
        gone = [state for state in self._states.values() if state.status in ("unloaded", "failed")]
        for state in sorted(gone, key=lambda one: one.version)[: max(0, len(self._states) - MAX_ADAPTERS)]:
            del self._states[state.name]


def _begin_load(bank: AdapterBank, state: AdapterState) -> Future[HeldAdapter]:
    """Load on a daemon thread. Process exit would wait for threads of `asyncio.to_thread`, which may hang."""
    result: Future[HeldAdapter] = Future()

    def load() -> None:
        with suppress(InvalidStateError):  # the caller was cancelled
            try:
                result.set_result(bank.load(state.name, state.path))
            except Exception as error:
                result.set_exception(error)

    threading.Thread(target=load, name="load-adapter", daemon=True).start()
    return result
