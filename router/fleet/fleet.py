"""Fleet: connections to all workers, the tasks that serve them, and their state."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any

import zmq.asyncio

from common.config import RouterConfig
from common.wire import ROLES, Curve, Role, warn_if_readable
from common.wire.messages import (
    PROTOCOL_VERSION,
    Message,
    RouterHeartbeat,
    RouterHello,
    ToRouter,
    WeightsRequest,
    WorkerHello,
)
from router.fleet.discovery import Endpoint, effective_endpoints, open_source
from router.fleet.prefix_index import PrefixIndex
from router.fleet.readiness import Pairing
from router.fleet.registry import WorkerRegistry
from router.fleet.weights import WeightsFiles
from router.fleet.worker import Worker
from router.fleet.worker_connection import ConnectionEvents, WorkerConnection
from router.fleet.worker_monitor import FleetEvent, FleetListener, WorkerMonitor

log = logging.getLogger(__name__)

CONTROL_HWM = 10_000
"""Maximum number of queued messages for one worker, and from it."""
CLOSE_LINGER_MS = 200
"""Time for queued messages to be sent when a connection closes, in milliseconds."""
MAX_DISCOVERED = 1024
"""Maximum number of discovered workers. A selector that matches a whole cluster must not exhaust file descriptors."""
SOCKETS_PER_WORKER = 4
"""ZeroMQ sockets per worker, including internal ones."""
KNOWN_SHARE = 0.8
"""Share of the discovered workers of each role that must have answered before a new router is ready. A router that
knows two of ten workers would send them all of its requests."""
INTRODUCTION_S = 15.0
"""Maximum time that a new router waits for that share, in seconds. Longer than any reconnection."""
TURNS_TO_LISTEN = 16
"""Iterations of the event loop that a message may need from socket to reader. The fleet waits for them before it judges
a worker to be silent."""


class WorkerFleet:
    """Connects to all known workers, and keeps `registry` and `index` up to date.

    Workers are configured or discovered. Discovered ones are added and removed while the router runs. `is_listed`
    returns whether all existing workers have been listed at least once.
    """

    def __init__(
        self,
        config: RouterConfig,
        listener: FleetListener,
        *,
        hwm: int = CONTROL_HWM,
        clock: Callable[[], float] = time.monotonic,
        models: Collection[str] = (),
    ) -> None:
        """With `models`, a `ModelCensus` supplies the workers of these model names through `reconcile`."""
        self.router_id = secrets.token_hex(8)
        self.registry = WorkerRegistry(
            () if models else config.prefill,
            () if models else config.decode,
            worker_timeout_s=config.worker_timeout_s,
            router_id=self.router_id,
        )
        self.index = PrefixIndex()
        self.failure = ""
        self._listener, self._clock, self._heartbeat_s = listener, clock, config.heartbeat_s
        self._monitor = WorkerMonitor(self.registry, self.index, listener, self._greet, self.send)
        self.weights = WeightsFiles(self.send)
        self.adapters, self.serving = self._monitor.adapters, self._monitor.serving
        self._hello = RouterHello(
            router_id=self.router_id,
            epoch=secrets.randbits(48),
            changes_roles=config.role_change,
            protocol=PROTOCOL_VERSION,
        )
        self._beat = RouterHeartbeat(router_id=self.router_id)
        self._curve = Curve.load(config.curve_key, config.curve_authorized)
        warn_if_readable(config.curve_key)
        self._hwm, self._models = hwm, models
        self.on_stranger: Callable[[str, str], None] = lambda address, model: None
        self.num_unassigned: Callable[[Role], int] = lambda role: 0
        """Returns the number of discovered workers of a role that may serve this model but have not said so yet."""
        self._events = ConnectionEvents(
            self._on_message, self._greet, self._on_cut, self.registry.on_refused, self.registry.on_unreadable
        )
        self.connections = {address: self._connection(address) for address in self.registry.workers}
        self.pairing = Pairing()
        self.source = None if models else open_source(config, self.reconcile)
        self.is_listed: Callable[[], bool] = lambda: True
        if self.source is not None:
            self.registry.explain = self.source.status.explain
            self.is_listed = self.source.status.is_synced
        self._wanted = {
            worker.address: Endpoint(worker.home, worker.address) for worker in self.registry.workers.values()
        }
        self._started_at: float | None = None
        self._introduced = config.discovery == "static"
        self._doubted: frozenset[Role] = frozenset()
        self._refused: set[str] = set()
        self._context: zmq.asyncio.Context | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._links: dict[str, list[asyncio.Task[None]]] = {}
        self._partings: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Start connecting to all workers, and return. Workers become ready as they answer."""
        self._context, self._started_at = zmq.asyncio.Context(), self._clock()
        most = max(len(self.connections), MAX_DISCOVERED if self.source is not None or self._models else 0)
        self._context.set(zmq.MAX_SOCKETS, max(1024, SOCKETS_PER_WORKER * most + 64))
        for connection in self.connections.values():
            self._open(connection, self._context)
        self._tasks.append(self._own(self._tick_forever(), "tick"))
        if self.source is not None:
            self._tasks.append(self._own(self.source.run(), "discovery"))

    async def close(self) -> None:
        """Stop all tasks and close all sockets. Aborts queued for workers are sent for up to `CLOSE_LINGER_MS`."""
        tasks, self._tasks = [*self._tasks, *(task for link in self._links.values() for task in link)], []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *self._partings, return_exceptions=True)
        await self.weights.close()
        for connection in self.connections.values():
            connection.close(CLOSE_LINGER_MS)
        if self._context is not None:
            await asyncio.to_thread(self._context.term)
            self._context = None

    def send(self, address: str, message: Message) -> bool:
        """Send without blocking. Returns False if the worker cannot receive the message now."""
        connection = self.connections.get(address)
        return connection is not None and connection.send(message)

    def abort(self, address: str, request_id: str, attempt: int) -> None:
        """Abort all attempts up to this one on the worker, now or when it is reachable again."""
        connection = self.connections.get(address)
        if connection is not None:
            connection.abort(request_id, attempt)

    def recent_events(self, now: float) -> tuple[FleetEvent, ...]:
        """Return the recent worker events, newest first."""
        return self._monitor.events.recent(now)

    def missing_answers(self, now: float) -> str:
        """Return which share of the discovered workers a new router still waits for; "" after that, and for ever."""
        if self._introduced:
            return ""
        is_over = self._started_at is not None and now - self._started_at > INTRODUCTION_S
        listed = [worker for worker in self.registry.workers.values() if not worker.withheld]
        for role in ROLES:
            pool = [worker for worker in listed if worker.home == role]
            num_known = sum(worker.life.known_epoch is not None for worker in pool)
            num_listed = len(pool) + self.num_unassigned(role)
            if num_known < KNOWN_SHARE * num_listed and not is_over:
                share = f"{num_known} of {num_listed} {role} workers have answered"
                return f"{share}, waiting for {KNOWN_SHARE:.0%} of them for up to {INTRODUCTION_S:g} s after the start"
        self._introduced = bool(listed)
        return ""

    def reconcile(self, endpoints: Sequence[Endpoint]) -> None:
        """Replace the list of all existing workers.

        A worker that is missing from the list gets no new requests. Its connection is closed once no request needs it.
        If all workers of a role are unready, their readiness is ignored.
        """
        if len(endpoints) > MAX_DISCOVERED:
            log.error("discovery: found %d workers, using only the first %d", len(endpoints), MAX_DISCOVERED)
        used, doubted = effective_endpoints(endpoints[:MAX_DISCOVERED])
        for role in doubted - self._doubted:
            log.warning("discovery: ignoring failed readiness probes, because all %s workers fail them", role)
        self._doubted = doubted
        self._wanted = {endpoint.address: endpoint for endpoint in used}
        self._refused.clear()
        self._follow()

    # ------------------------------------------------------------ joining and leaving workers

    def _follow(self) -> None:
        """Remove workers that are gone and unused, withhold those that are leaving, add new ones."""
        for address, worker in list(self.registry.workers.items()):
            endpoint = self._wanted.get(address)
            if endpoint is not None and endpoint.role == worker.home:
                self._withhold(worker, endpoint.withheld)
            elif self._listener.uses(address):
                self._withhold(worker, "no longer listed")
            else:
                self._leave(worker)
        for address, endpoint in self._wanted.items():
            if address not in self.registry.workers and address not in self._refused:
                self._join(endpoint)

    def _withhold(self, worker: Worker, why: str) -> None:
        if worker.withheld == why:
            return
        log.info("%s (%s): %s", worker.name, worker.role, f"no new requests: {why}" if why else "accepts new requests")
        self._monitor.events.add("withheld" if why else "back", worker, self._clock(), why)
        if self.registry.withhold(worker.address, why):
            self._listener.on_ready(worker.address)

    def _join(self, endpoint: Endpoint) -> None:
        connection = self._connection(endpoint.address)
        self.registry.add(endpoint.address, endpoint.role, endpoint.withheld)
        self.connections[endpoint.address] = connection
        log.info("worker at %s (%s): discovered", endpoint.address, endpoint.role)
        self._monitor.events.add("found", self.registry.workers[endpoint.address], self._clock())
        if self._context is None:
            return
        try:
            self._open(connection, self._context)
        except zmq.ZMQError as error:  # usually out of file descriptors; retried at the next change of discovery
            log.error("worker at %s: cannot connect: %s", endpoint.address, error)
            self._refused.add(endpoint.address)
            self._leave(self.registry.workers[endpoint.address])

    def _leave(self, worker: Worker) -> None:
        address = worker.address
        self.registry.remove(address)
        connection, link = self.connections.pop(address), self._links.pop(address, [])
        for task in link:  # immediately: no message may arrive from an address that is no longer registered
            task.cancel()
        self._monitor.on_gone(address)
        log.info("%s (%s): removed: no longer listed", worker.name, worker.role)
        self._monitor.events.add("gone", worker, self._clock())
        parting = asyncio.create_task(_part(connection, link), name=f"fleet: part from worker at {address}")
        self._partings.add(parting)
        parting.add_done_callback(self._partings.discard)

    def _connection(self, address: str) -> WorkerConnection:
        return WorkerConnection(address, self.router_id, self._events, self._hwm, self._curve)

    def _open(self, connection: WorkerConnection, context: zmq.asyncio.Context) -> None:
        address = connection.address
        connection.open(context)
        self._links[address] = [
            self._own(connection.receive(), f"receive from worker at {address}"),
            self._own(connection.watch(), f"watch worker at {address}"),
        ]

    # ------------------------------------------------------------ inside

    def _own(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=f"fleet: {name}")
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        self.failure = f"router task '{task.get_name()}' ended: {error!r}"
        log.critical("%s", self.failure, exc_info=error)

    async def _tick_forever(self) -> None:
        while True:
            if self.registry.is_in_doubt(self._clock()):
                for _ in range(TURNS_TO_LISTEN):
                    await asyncio.sleep(0)
            now = self._clock()
            self._monitor.sweep(now)
            self._follow()
            self._compare_layouts()
            self.index.expire(now)
            for address, connection in self.connections.items():
                connection.drops.flush(time.monotonic())
                if self.registry.needs_hello(address):
                    connection.send(self._hello)
                else:
                    connection.flush_aborts()
                    connection.send(self._beat)
            self._listener.on_tick(now)
            await asyncio.sleep(self._heartbeat_s)

    def _on_cut(self, address: str) -> None:
        self._monitor.on_cut(address, self._clock())

    def _greet(self, address: str) -> None:
        self.connections[address].send(self._hello)

    def _on_message(self, address: str, message: ToRouter) -> None:
        if self._models and isinstance(message, WorkerHello) and message.model not in self._models:
            # Deferred: the callback may remove the worker, and this connection has more messages to process.
            asyncio.get_running_loop().call_soon(self.on_stranger, address, message.model)
            return
        if isinstance(message, WeightsRequest):
            self.weights.on_request(address, message)
            return
        self._monitor.on_message(address, message, self._clock())
        if isinstance(message, WorkerHello) and not message.lost_router:
            self.connections[address].flush_aborts()

    def _compare_layouts(self) -> None:
        pairing = Pairing.of(
            self.registry.ready("prefill"), self.registry.ready("decode"), self.registry.workers.values()
        )
        if pairing.reason != self.pairing.reason and pairing.reason:
            log.warning("%s. Finish or undo the update, or give both pools the same settings", pairing.reason)
        self.pairing = pairing


async def _part(connection: WorkerConnection, link: Sequence[asyncio.Task[None]]) -> None:
    """Close a connection after its tasks have ended."""
    await asyncio.gather(*link, return_exceptions=True)
    connection.close(CLOSE_LINGER_MS)
