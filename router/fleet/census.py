"""Assigns workers to the models of one router, by the model name in each worker's hello.

    discovery or a list ──> addresses ── hello ──> model ──> the fleet of that model, which connects permanently
                                 └──────<── a hello with another model (the worker was restarted) ──┘

Addresses that have not sent a hello belong to no fleet. They are asked until they answer.
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
from common.wire.messages import PROTOCOL_VERSION, RouterHello, ToRouter, WorkerHello
from router.fleet.discovery import Endpoint, Publish, open_source
from router.fleet.fleet import CLOSE_LINGER_MS, MAX_DISCOVERED, SOCKETS_PER_WORKER
from router.fleet.readiness import SHOWN
from router.fleet.worker import worker_name
from router.fleet.worker_connection import ConnectionEvents, WorkerConnection

log = logging.getLogger(__name__)

HWM = 16
"""Maximum number of queued messages for and from one worker, which is only asked for its hello."""
SILENT = "no hello received"
ANSWER_S = 30.0
"""Time after which a listed worker that has not answered is not waited for, in seconds."""


class ModelCensus:
    """Model assignment. Not thread-safe. `known` maps the workers' model names to the router's model names."""

    def __init__(
        self,
        config: RouterConfig,
        known: Mapping[str, str],
        fleets: Mapping[str, Publish],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`fleets` receive the endpoints of each model. Raises ConfigError."""
        self.failure = ""
        self._known, self._fleets, self._clock = known, fleets, clock
        self._heartbeat_s = config.heartbeat_s
        self._curve = Curve.load(config.curve_key, config.curve_authorized)
        self._router_id = secrets.token_hex(8)
        self._hello = RouterHello(router_id=self._router_id, epoch=secrets.randbits(48), protocol=PROTOCOL_VERSION)
        self._events = ConnectionEvents(
            self._on_message, lambda address: None, self._on_cut, self._on_problem, self._on_problem
        )
        self.source = open_source(config, self.reconcile)
        listed: dict[str, Role] = dict.fromkeys(config.decode, "decode")
        listed |= dict.fromkeys(config.prefill, "prefill")
        self._endpoints = {address: Endpoint(role, address) for address, role in listed.items()}
        self._models: dict[str, str] = {}
        self._said: dict[str, str] = {}
        self._listed_at: float | None = None
        self._names: dict[str, str] = {}
        self._published: dict[str, tuple[Endpoint, ...]] = dict.fromkeys(fleets, ())
        self._asked: dict[str, tuple[WorkerConnection, list[asyncio.Task[None]]]] = {}
        self._partings: set[asyncio.Task[None]] = set()
        self._context: zmq.asyncio.Context | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start asking workers, and return."""
        self._context = zmq.asyncio.Context()
        self._context.set(zmq.MAX_SOCKETS, max(1024, SOCKETS_PER_WORKER * MAX_DISCOVERED + 64))
        self._tasks.append(self._own(asyncio.create_task(self._ask_forever(), name="census: ask")))
        if self.source is not None:
            self._tasks.append(self._own(asyncio.create_task(self.source.run(), name="census: discovery")))

    async def close(self) -> None:
        """Stop all tasks and close all sockets."""
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
        """Replace the list of all existing workers, whatever model they serve."""
        if len(endpoints) > MAX_DISCOVERED:
            log.error("discovery: found %d workers, using only the first %d", len(endpoints), MAX_DISCOVERED)
        self._endpoints = {endpoint.address: endpoint for endpoint in endpoints[:MAX_DISCOVERED]}
        for known in (self._models, self._said, self._names):
            for address in known.keys() - self._endpoints.keys():
                del known[address]
        self._publish()

    def on_stranger(self, address: str, model: str) -> None:
        """Ask a worker again that now serves another model."""
        if self._models.pop(address, None) is not None:
            log.info("%s: now serves %s", self._name(address), model)
            self._publish()

    def is_listed(self) -> bool:
        """Return whether workers have been listed and have had time to answer."""
        if self.source is not None and not self.source.status.is_synced():
            return False
        now = self._clock()
        self._listed_at = now if self._listed_at is None else self._listed_at
        has_answers = all(address in self._models or address in self._said for address in self._endpoints)
        return has_answers or now - self._listed_at >= ANSWER_S

    def explain(self, role: Role, now: float) -> str:
        """Return why a model has no worker of a role: the state of workers without a known model, or of discovery."""
        unasked = [one for one, end in self._endpoints.items() if end.role == role and one not in self._models]
        if not unasked:
            found = "" if self.source is None else self.source.status.explain(role, now)
            return found or f"no {role} worker serves this model"
        said = [f"{self._name(address)}: {self._said.get(address, SILENT)}" for address in unasked[:SHOWN]]
        more = f"; and {len(unasked) - SHOWN} more" if len(unasked) > SHOWN else ""
        return f"no {role} worker serves this model ({'; '.join(said)}{more})"

    def num_unassigned(self, role: Role) -> int:
        """Return the number of workers of a role that may get requests but have not said which model they serve."""
        listed = (one for one, end in self._endpoints.items() if end.role == role and not end.withheld)
        return sum(address not in self._names for address in listed)

    # ------------------------------------------------------------ inside

    async def _ask_forever(self) -> None:
        """Ask each address whose model is unknown, once per heartbeat interval."""
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
        except zmq.ZMQError as error:  # usually out of file descriptors; retried at the next heartbeat
            log.error("%s: cannot connect: %s", self._name(address), error)
            connection.close(0)
            return
        link = [
            self._own(asyncio.create_task(connection.receive(), name=f"census: receive from worker at {address}")),
            self._own(asyncio.create_task(connection.watch(), name=f"census: watch worker at {address}")),
        ]
        self._asked[address] = connection, link

    def _part(self, address: str) -> None:
        connection, link = self._asked.pop(address)
        for task in link:
            task.cancel()
        parting = asyncio.create_task(_close(connection, link), name=f"census: part from worker at {address}")
        self._partings.add(parting)
        parting.add_done_callback(self._partings.discard)

    def _on_message(self, address: str, message: ToRouter) -> None:
        if not isinstance(message, WorkerHello) or message.lost_router or address not in self._endpoints:
            return
        self._names[address] = message.worker_id
        model = self._known.get(message.model)
        if model is None:
            if self._said.get(address) != (said := f"serves {message.model}"):
                self._said[address] = said
                models = ", ".join(self._fleets)
                log.info("%s: %s, which is not a model of this router: %s", self._name(address), said, models)
            return
        self._said.pop(address, None)
        if self._models.get(address) != model:
            self._models[address] = model
            log.info("worker %s at %s: serves %s", message.worker_id, address, model)
            self._publish()

    def _on_cut(self, address: str) -> None:
        self._said.pop(address, None)

    def _on_problem(self, address: str, why: str) -> None:
        """Record that no connection can be made, or that the worker's messages are invalid."""
        self._said[address] = f"cannot be used: {why}"

    def _publish(self) -> None:
        """Send each fleet its endpoints, if they have changed."""
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

    def _name(self, address: str) -> str:
        return worker_name(self._names.get(address, ""), address)


async def _close(connection: WorkerConnection, link: Sequence[asyncio.Task[None]]) -> None:
    """Close a connection after its tasks have ended."""
    await asyncio.gather(*link, return_exceptions=True)
    connection.close(CLOSE_LINGER_MS)
