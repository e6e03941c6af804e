"""Loads and unloads LoRA adapters on all workers of a model, and waits for the outcome."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator

from common.errors import RETRY_AFTER_S, DeadlineExceeded, InvalidRequest, ModelNotFound, Unavailable
from common.wire import ROLES
from common.wire.messages import SetAdapter
from router.fleet import AdapterInfo, FleetAdapters, Outcome, WorkerFleet

log = logging.getLogger(__name__)
LOAD_TIMEOUT_S = 120.0
"""Maximum time for all workers together to read an adapter, possibly from a network disk, and to load it."""
POLL_S = 0.02
"""Interval at which the state of an order is checked, in seconds."""


class Superseded(InvalidRequest):
    """A newer order for the same name came from another router or router process."""


class AdapterOrders:
    """Adapter commands of one model, used by the API endpoints."""

    def __init__(self, fleet: WorkerFleet, *, timeout_s: float = LOAD_TIMEOUT_S) -> None:
        self._fleet, self._timeout_s = fleet, timeout_s
        self._adapters: FleetAdapters = fleet.adapters
        self._busy: set[str] = set()

    def has(self, name: str) -> bool:
        """Return whether clients may request this adapter."""
        return self._adapters.has(name)

    def names(self) -> Iterator[AdapterInfo]:
        """Return the adapters that clients may request."""
        return self._adapters.names()

    def path_of(self, name: str) -> str:
        """Return the folder of an adapter, "" if it is not loaded."""
        return self._adapters.path_of(name)

    def digest_of(self, name: str) -> str:
        """Return the digest of an adapter's weights. Raises Unavailable while the first worker is loading them."""
        if digest := self._adapters.digest_of(name):
            return digest
        raise Unavailable(f"Adapter {name!r} is still loading.", param="model", retry_after_s=RETRY_AFTER_S)

    async def load(self, name: str, path: str, *, in_place: bool) -> Outcome:
        """Load an adapter on all workers that were started with `--max-loras`.

        `in_place` replaces an adapter of the same name. If a worker fails to load it, the previous adapter is restored.

        Raises InvalidRequest with the worker's reason, Superseded, Unavailable without workers, DeadlineExceeded.
        """
        if self._adapters.path_of(name) and not in_place:
            raise InvalidRequest(
                f"lora_name: adapter {name!r} is already loaded: unload it first, or set load_inplace",
                param="lora_name",
            )
        if not self._adapters.takers():
            raise self._no_slots()
        with self._reserve(name):
            before = self._adapters.path_of(name)
            order = self._send(name, path)
            outcome = await self._settled(order)
            if outcome.superseded:
                raise Superseded(f"lora_name: another router changed {name!r} at the same time", param="lora_name")
            if not outcome.failures and not outcome.missing and outcome.num_loaded:
                return outcome
            await self._settled(self._send(name, before))
        if outcome.failures:
            raise InvalidRequest(f"lora_path: {outcome.failures[0]}", param="lora_path")
        if not outcome.missing:
            raise Unavailable(f"Adapter {name!r} was not loaded: its workers are gone.", retry_after_s=RETRY_AFTER_S)
        left = ", ".join(outcome.missing)
        raise DeadlineExceeded(f"Adapter {name!r} was not loaded within {self._timeout_s:g} s by {left}")

    async def unload(self, name: str) -> None:
        """Unload an adapter from all workers. Running requests keep using it until they end.

        Raises ModelNotFound, DeadlineExceeded.
        """
        if not self._adapters.path_of(name):
            raise ModelNotFound(f"The adapter {name!r} does not exist.", param="lora_name")
        with self._reserve(name):
            outcome = await self._settled(self._send(name, ""))
        if outcome.missing and not outcome.superseded:
            left = ", ".join(outcome.missing)
            raise DeadlineExceeded(f"Adapter {name!r} was not unloaded within {self._timeout_s:g} s by {left}")

    def _no_slots(self) -> InvalidRequest | Unavailable:
        """Return the error for a model without workers that accept adapters.

        Waiting helps only if no worker is ready.
        """
        num_ready = sum(len(self._fleet.registry.ready(role)) for role in ROLES)
        if num_ready:
            return InvalidRequest(
                f"lora_name: none of the {num_ready} ready workers accepts adapters: start workers with --max-loras",
                param="lora_name",
            )
        return Unavailable("No worker is ready to load an adapter.", retry_after_s=RETRY_AFTER_S)

    def _reserve(self, name: str) -> _Reservation:
        """Reserve a name. Raises InvalidRequest while another order for the name is in progress."""
        if name in self._busy:
            raise InvalidRequest(f"lora_name: adapter {name!r} is already being loaded or unloaded", param="lora_name")
        return _Reservation(self._busy, name)

    def _send(self, name: str, path: str) -> SetAdapter:
        order = self._adapters.order(name, path, time.time_ns() // 1000)
        for worker in list(self._fleet.registry.workers.values()):
            if worker.hello is not None and worker.hello.max_loras:
                self._fleet.send(worker.address, order)  # resent after the next heartbeat if lost
        return order

    async def _settled(self, order: SetAdapter) -> Outcome:
        """Wait until every worker has executed or rejected the order, or until the timeout. Returns the outcome."""
        deadline = time.monotonic() + self._timeout_s
        while (outcome := self._adapters.outcome(order)).missing and not outcome.superseded:
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(POLL_S)
        return outcome


class _Reservation:
    """Marks a name as busy while an order for it is in progress."""

    def __init__(self, busy: set[str], name: str) -> None:
        self._busy, self._name = busy, name

    def __enter__(self) -> None:
        self._busy.add(self._name)

    def __exit__(self, *_: object) -> None:
        self._busy.discard(self._name)
