"""Divides workers among the models of one router: each worker says by its hello which model it serves.

    discovery or a list ──> addresses ── hello ──> model ──> the fleet of that model, which connects for good
                                 └──────<── a hello of another model (the worker was started anew) ──┘

An address that has not said what it serves belongs to no fleet; the census asks it until it has.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence

import zmq.asyncio

from common.config import RouterConfig
from common.wire import Curve, Role
from common.wire.messages import RouterHello, ToRouter, WorkerHello
from router.fleet.discovery import Endpoint, Publish, open_source
from router.fleet.fleet import CLOSE_LINGER_MS, MAX_DISCOVERED, SOCKETS_PER_WORKER
from router.fleet.readiness import SHOWN
from router.fleet.worker_connection import ConnectionEvents, WorkerConnection

log = logging.getLogger(__name__)

HWM = 16
"""Messages queued for one worker, and from it: it is only asked for its name."""
SILENT = "has not said what it serves"


class ModelCensus:
    """Owned by the router's event loop. `known` maps what workers call a model to the router's name of it."""

    def __init__(
        self,
        config: RouterConfig,
        known: Mapping[str, str],
        fleets: Mapping[str, Publish],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`fleets` take the endpoints of each model. Raises ConfigError."""
        self.failure = ""
        self._known, self._fleets, self._clock = known, fleets, clock
        self._heartbeat_s = config.heartbeat_s
        self._curve = Curve.load(config.curve_key, config.curve_authorized)
        self._router_id = secrets.token_hex(8)
        self._hello = RouterHello(router_id=self._router_id, epoch=secrets.randbits(48))
        self._events = ConnectionEvents(
            self._on_message, lambda address: None, self._on_cut, self._on_problem, self._on_problem
        )
        self.source = open_source(config, self.reconcile)
        listed: dict[str, Role] = dict.fromkeys(config.decode, "decode")
        listed |= dict.fromkeys(config.prefill, "prefill")
        self._endpoints = {address: Endpoint(role, address) for address, role in listed.items()}
        self._models: dict[str, str] = {}
        self._said: dict[str, str] = {}
        self._published: dict[str, tuple[Endpoint, ...]] = dict.fromkeys(fleets, ())
        self._asked: dict[str, tuple[WorkerConnection, list[asyncio.Task[None]]]] = {}
        self._partings: set[asyncio.Task[None]] = set()
        self._context: zmq.asyncio.Context | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Begin to ask; returns at once."""
        self._context = zmq.asyncio.Context()
        self._context.set(zmq.MAX_SOCKETS, max(1024, SOCKETS_PER_WORKER * MAX_DISCOVERED + 64))
        self._tasks.append(self._own(asyncio.create_task(self._ask_forever(), name="census: ask")))
        if self.source is not None:
            self._tasks.append(self._own(asyncio.create_task(self.source.run(), name="census: discovery")))

    async def close(self) -> None:
        """End every task and socket."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        for address in list(self._asked):
            self._part(address)
        await asyncio.gather(*tasks, *self._partings, return_exceptions=True)
        if self._context is not None:
            await asyncio.to_thread(self._context.term)
            self._context = None

    def reconcile(self, endpoints: Sequence[Endpoint]) -> None:
        """Take `endpoints` as all workers that exist, whatever they serve."""
        if len(endpoints) > MAX_DISCOVERED:
            log.error("discovery found %d workers, the first %d are used", len(endpoints), MAX_DISCOVERED)
        self._endpoints = {endpoint.address: endpoint for endpoint in endpoints[:MAX_DISCOVERED]}
        for said in (self._models, self._said):
            for address in said.keys() - self._endpoints.keys():
                del said[address]
        self._publish()

    def on_stranger(self, address: str, model: str) -> None:
        """The worker at an address serves another model than it did: ask it again."""
        if self._models.pop(address, None) is not None:
            log.info("worker %s serves %s now", address, model)
            self._publish()

    def explain(self, role: Role, now: float) -> str:
        """Why no worker of a role is known of some model: what the others say, or discovery."""
        unasked = [one for one, end in self._endpoints.items() if end.role == role and one not in self._models]
        if not unasked:
            found = "" if self.source is None else self.source.status.explain(role, now)
            return found or f"no {role} worker says that it serves this model"
        said = [f"{address} {self._said.get(address, SILENT)}" for address in unasked[:SHOWN]]
        more = f"; and {len(unasked) - SHOWN} more" if len(unasked) > SHOWN else ""
        return f"no {role} worker says that it serves this model ({'; '.join(said)}{more})"

    # ------------------------------------------------------------ inside

    async def _ask_forever(self) -> None:
        """Ask each address whose model is not known, once a heartbeat."""
        while True:
            unknown = self._endpoints.keys() - self._models.keys()
            for address in self._asked.keys() - unknown:
                self._part(address)
            for address in unknown - self._asked.keys():
                self._open(address)
            for connection, _ in self._asked.values():
                connection.send(self._hello)
            await asyncio.sleep(self._heartbeat_s)

    def _open(self, address: str) -> None:
        assert self._context is not None
        connection = WorkerConnection(address, self._router_id, self._events, HWM, self._curve)
        try:
            connection.open(self._context)
        except zmq.ZMQError as error:  # most likely no descriptor is left: tried again with the next heartbeat
            log.error("no connection to worker %s: %s", address, error)
            connection.close(0)
            return
        link = [
            self._own(asyncio.create_task(connection.receive(), name=f"census: receive {address}")),
            self._own(asyncio.create_task(connection.watch(), name=f"census: watch {address}")),
        ]
        self._asked[address] = connection, link

    def _part(self, address: str) -> None:
        connection, link = self._asked.pop(address)
        for task in link:
            task.cancel()
        parting = asyncio.create_task(_close(connection, link), name=f"census: part from {address}")
        self._partings.add(parting)
        parting.add_done_callback(self._partings.discard)

    def _on_message(self, address: str, message: ToRouter) -> None:
        if not isinstance(message, WorkerHello) or message.lost_router or address not in self._endpoints:
            return
        model = self._known.get(message.model)
        if model is None:
            if self._said.get(address) != (said := f"serves {message.model}"):
                self._said[address] = said
                log.info("worker %s %s, which is none of %s", address, said, ", ".join(self._fleets))
            return
        self._said.pop(address, None)
        if self._models.get(address) != model:
            self._models[address] = model
            log.info("worker %s serves %s", address, model)
            self._publish()

    def _on_cut(self, address: str) -> None:
        self._said.pop(address, None)

    def _on_problem(self, address: str, why: str) -> None:
        """No connection can be made, or what the worker sends is no message."""
        self._said[address] = f"cannot be understood: {why}"

    def _publish(self) -> None:
        """Give each fleet its endpoints, if they have changed."""
        for name, publish in self._fleets.items():
            of_model = [end for address, end in self._endpoints.items() if self._models.get(address) == name]
            if (endpoints := tuple(sorted(of_model))) != self._published[name]:
                self._published[name] = endpoints
                publish(endpoints)

    def _own(self, task: asyncio.Task[None]) -> asyncio.Task[None]:
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            error = task.exception()
            self.failure = f"router task '{task.get_name()}' ended: {error!r}"
            log.critical("%s", self.failure, exc_info=error)


async def _close(connection: WorkerConnection, link: Sequence[asyncio.Task[None]]) -> None:
    """Close a connection once its loops have ended."""
    await asyncio.gather(*link, return_exceptions=True)
    connection.close(CLOSE_LINGER_MS)
