"""All connected workers: sockets, signs of life, and what becomes of them. The only place that owns tasks."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import zmq.asyncio

from diptych.common.messages import (
    Message,
    RequestFailed,
    RouterHeartbeat,
    RouterHello,
    TokenOutput,
    ToRouter,
    WorkerHeartbeat,
    WorkerHello,
)
from diptych.common.settings import RouterConfig
from diptych.router.dispatch.connection import Connection, ConnectionEvents
from diptych.router.dispatch.registry import STALL_TIMEOUT_S, WorkerRegistry

log = logging.getLogger(__name__)

CONTROL_HWM = 10_000
CLOSE_LINGER_MS = 200


class FleetListener(Protocol):
    """Who is told what workers send and what becomes of them. All calls come from the fleet's event loop."""

    def on_output(self, address: str, output: TokenOutput) -> None: ...
    def on_failed(self, address: str, failed: RequestFailed) -> None: ...
    def on_lost(self, address: str, reason: str) -> None:
        """The worker's life ended: everything in flight there has failed."""

    def on_started(self, address: str) -> None:
        """A worker with an epoch not seen before said hello: it remembers nothing."""

    def on_ready(self, address: str) -> None:
        """The worker may be given work from now on."""

    def on_tick(self, now: float) -> None:
        """Once every heartbeat."""


class WorkerFleet:
    """Keeps one connection to every configured worker and its state up to date in `registry`."""

    def __init__(
        self,
        config: RouterConfig,
        listener: FleetListener,
        *,
        hwm: int = CONTROL_HWM,
        stall_timeout_s: float = STALL_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.registry = WorkerRegistry(
            config.prefill, config.decode, worker_timeout_s=config.worker_timeout_s, stall_timeout_s=stall_timeout_s
        )
        self.router_id = secrets.token_hex(8)
        self.failure = ""
        self._listener, self._clock, self._heartbeat_s = listener, clock, config.heartbeat_s
        self._hello = RouterHello(router_id=self.router_id, epoch=secrets.randbits(48))
        self._beat = RouterHeartbeat(router_id=self.router_id)
        events = ConnectionEvents(self._on_message, self._on_up, self._on_cut)
        self.connections = {
            address: Connection(address, self.router_id, events, hwm) for address in self.registry.workers
        }
        self._context: zmq.asyncio.Context | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Connect to every worker; returns at once, workers become ready as they answer."""
        self._context = zmq.asyncio.Context()
        self._context.set(zmq.MAX_SOCKETS, max(1024, 4 * len(self.connections)))
        for address, connection in self.connections.items():
            connection.open(self._context)
            self._own(connection.receive(), f"receive {address}")
            self._own(connection.watch(), f"watch {address}")
        self._own(self._tick_forever(), "tick")

    async def close(self) -> None:
        """End every task and socket; what is queued for workers (aborts) has a moment to leave."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for connection in self.connections.values():
            connection.close(CLOSE_LINGER_MS)
        if self._context is not None:
            await asyncio.to_thread(self._context.term)
            self._context = None

    def send(self, address: str, message: Message) -> bool:
        """Send without waiting; False when the worker cannot take the message now."""
        return self.connections[address].send(message)

    def abort(self, address: str, request_id: str, attempt: int) -> None:
        """Have the worker forget every attempt of the request up to this one, at the latest when it is back."""
        self.connections[address].abort(request_id, attempt)

    # ------------------------------------------------------------ inside

    def _own(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=f"fleet: {name}")
        task.add_done_callback(self._on_task_done)
        self._tasks.append(task)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        self.failure = f"router task '{task.get_name()}' ended: {error!r}"
        log.critical("%s", self.failure, exc_info=error)

    async def _tick_forever(self) -> None:
        while True:
            now = self._clock()
            for worker in self.registry.sweep(now):
                self._lost(worker.address)
            for address, connection in self.connections.items():
                connection.drops.flush(time.monotonic())
                if self.registry.needs_hello(address):
                    connection.send(self._hello)
                else:
                    connection.flush_aborts()
                    connection.send(self._beat)
            self._listener.on_tick(now)
            await asyncio.sleep(self._heartbeat_s)

    def _on_up(self, address: str) -> None:
        self.connections[address].send(self._hello)

    def _on_cut(self, address: str) -> None:
        if self.registry.on_cut(address):
            self._lost(address)

    def _on_message(self, address: str, message: ToRouter) -> None:
        match message:
            case TokenOutput():
                self._listener.on_output(address, message)
            case RequestFailed():
                self._listener.on_failed(address, message)
            case WorkerHeartbeat():
                self._on_heartbeat(address, message)
            case WorkerHello():
                self._on_hello(address, message)

    def _on_hello(self, address: str, hello: WorkerHello) -> None:
        worker = self.registry.workers[address]
        started = worker.known_epoch != hello.epoch
        if self.registry.on_hello(address, hello, self._clock()):
            self._lost(address, f"restarted as epoch {hello.epoch}")
        if started:
            log.info("worker %s (%s, %s) says hello", hello.worker_id, address, hello.fingerprint)
            self._listener.on_started(address)
        self.connections[address].flush_aborts()

    def _on_heartbeat(self, address: str, beat: WorkerHeartbeat) -> None:
        worker = self.registry.workers[address]
        was_ready = worker.ready
        if self.registry.on_heartbeat(address, beat, self._clock()):
            self._lost(address)
        if worker.hello is None:
            self.connections[address].send(self._hello)
        if worker.ready and not was_ready:
            log.info("worker %s", worker.describe(self._clock()))
            self._listener.on_ready(address)

    def _lost(self, address: str, reason: str = "") -> None:
        reason = reason or self.registry.workers[address].reason
        log.warning("worker %s is lost: %s", address, reason)
        self._listener.on_lost(address, reason)
