"""Loads and unloads LoRA adapters on every worker of a model, and waits until all have done so."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator

from common.errors import RETRY_AFTER_S, DeadlineExceeded, InvalidRequest, ModelNotFound, Unavailable
from common.wire import ROLES
from common.wire.messages import SetAdapter
from router.fleet import FleetAdapters, KnownAdapter, Outcome, WorkerFleet

log = logging.getLogger(__name__)
LOAD_TIMEOUT_S = 120.0
"""How long all workers together may take to read an adapter, say from a network disk, and to find a place for it."""
POLL_S = 0.02
"""How often an order looks whether every worker has carried it out."""


class Superseded(InvalidRequest):
    """A newer order for the same name came from another router, or from another process of this one."""


class AdapterOrders:
    """Endpoints load and unload the adapters of one model through it."""

    def __init__(self, fleet: WorkerFleet, *, timeout_s: float = LOAD_TIMEOUT_S) -> None:
        self._fleet, self._timeout_s = fleet, timeout_s
        self._adapters: FleetAdapters = fleet.adapters
        self._busy: set[str] = set()

    def has(self, name: str) -> bool:
        """Whether clients may ask for an adapter of this name."""
        return self._adapters.has(name)

    def names(self) -> Iterator[KnownAdapter]:
        """The adapters that clients may ask for."""
        return self._adapters.names()

    def path_of(self, name: str) -> str:
        """The folder that a name stands for; "" for a name that stands for none."""
        return self._adapters.path_of(name)

    def digest_of(self, name: str) -> str:
        """The weights that a name stands for now. Raises Unavailable while the first worker still loads them."""
        if digest := self._adapters.digest_of(name):
            return digest
        raise Unavailable(f"adapter {name!r} is being loaded", param="model", retry_after_s=RETRY_AFTER_S)

    async def load(self, name: str, path: str, *, in_place: bool) -> Outcome:
        """Load an adapter on all workers that have places for adapters.

        `in_place` replaces what the name stands for now. When a worker cannot load it, the name stands again for what
        it stood for before. Raises InvalidRequest with the worker's reason, Superseded, Unavailable without workers,
        DeadlineExceeded.
        """
        if self._adapters.path_of(name) and not in_place:
            raise InvalidRequest(
                f"lora_name: adapter {name!r} is loaded already: unload it first, or set load_inplace",
                param="lora_name",
            )
        if not self._adapters.takers():
            raise self._no_places()
        with self._alone(name):
            before = self._adapters.path_of(name)
            order = self._send(name, path)
            outcome = await self._settled(order)
            if outcome.superseded:
                raise Superseded(f"lora_name: another router changed {name!r} meanwhile", param="lora_name")
            if not outcome.failures and not outcome.missing and outcome.num_loaded:
                return outcome
            await self._settled(self._send(name, before))
        if outcome.failures:
            raise InvalidRequest(f"lora_path: {outcome.failures[0]}", param="lora_path")
        if not outcome.missing:
            raise Unavailable(f"adapter {name!r} was not loaded: its workers were lost", retry_after_s=RETRY_AFTER_S)
        left = ", ".join(outcome.missing)
        raise DeadlineExceeded(f"adapter {name!r} was not loaded within {self._timeout_s:g} s by {left}")

    async def unload(self, name: str) -> None:
        """Let a name stand for nothing on all workers; requests that use it go on to their end.

        Raises ModelNotFound, DeadlineExceeded.
        """
        if not self._adapters.path_of(name):
            raise ModelNotFound(f"there is no adapter {name!r} here", param="lora_name")
        with self._alone(name):
            outcome = await self._settled(self._send(name, ""))
        if outcome.missing and not outcome.superseded:
            left = ", ".join(outcome.missing)
            raise DeadlineExceeded(f"adapter {name!r} was not unloaded within {self._timeout_s:g} s by {left}")

    def _no_places(self) -> InvalidRequest | Unavailable:
        """The error when no worker has places for adapters: waiting helps only while no worker is ready at all."""
        num_ready = sum(len(self._fleet.registry.ready(role)) for role in ROLES)
        if num_ready:
            return InvalidRequest(
                f"lora_name: none of {num_ready} ready workers has places for adapters: start some with --max-loras",
                param="lora_name",
            )
        return Unavailable("no worker is ready to load an adapter", retry_after_s=RETRY_AFTER_S)

    def _alone(self, name: str) -> _Turn:
        """Begin an order for a name. Raises InvalidRequest while another order for this name is carried out."""
        if name in self._busy:
            raise InvalidRequest(f"lora_name: adapter {name!r} is being loaded or unloaded", param="lora_name")
        return _Turn(self._busy, name)

    def _send(self, name: str, path: str) -> SetAdapter:
        order = self._adapters.order(name, path, time.time_ns() // 1000)
        for worker in list(self._fleet.registry.workers.values()):
            if worker.hello is not None and worker.hello.max_loras:
                self._fleet.send(worker.address, order)  # what is lost is sent again after the next heartbeat
        return order

    async def _settled(self, order: SetAdapter) -> Outcome:
        """Wait until every worker has carried out or refused the order, or time is over; returns the outcome."""
        deadline = time.monotonic() + self._timeout_s
        while (outcome := self._adapters.outcome(order)).missing and not outcome.superseded:
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(POLL_S)
        return outcome


class _Turn:
    """Marks a name as busy while an order for it is carried out."""

    def __init__(self, busy: set[str], name: str) -> None:
        self._busy, self._name = busy, name

    def __enter__(self) -> None:
        self._busy.add(self._name)

    def __exit__(self, *_: object) -> None:
        self._busy.discard(self._name)
