"""Liveness of workers, from their messages and their silence. No I/O."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from common.wire.messages import (
    BlockEvents,
    BlockSnapshot,
    BlockSnapshotRequest,
    Message,
    PooledOutput,
    PromptLogprobs,
    PromptResult,
    RequestFailed,
    TokenOutput,
    ToRouter,
    WorkerHeartbeat,
    WorkerHello,
)
from router.fleet.adapters import FleetAdapters
from router.fleet.prefix_index import BlockReports, PrefixIndex
from router.fleet.registry import WorkerRegistry
from router.fleet.serving import FleetServing
from router.fleet.worker import Worker

NUM_KEPT = 50
"""Number of stored events, shown at /dashboard."""


@dataclass(frozen=True, slots=True)
class FleetEvent:
    """An event of a worker, `age_s` seconds ago. `worker` is its id, or its address before its first hello.

    `kind`: found and gone (discovery), withheld and back (new requests), ready, lost, role (its role changed). `role`
    is the role at that time.
    """

    kind: str
    worker: str
    role: str
    detail: str = ""
    age_s: float = 0.0


class FleetEvents:
    """The last `NUM_KEPT` events."""

    def __init__(self) -> None:
        self._events: deque[tuple[float, FleetEvent]] = deque(maxlen=NUM_KEPT)

    def add(self, kind: str, worker: Worker, now: float, detail: str = "") -> None:
        """Record an event at `now`."""
        self._events.append((now, FleetEvent(kind, worker.worker_id or worker.address, worker.role, detail)))

    def recent(self, now: float) -> tuple[FleetEvent, ...]:
        """Return the events, newest first."""
        return tuple(replace(event, age_s=max(0.0, now - at)) for at, event in reversed(self._events))


log = logging.getLogger(__name__)


class FleetListener(Protocol):
    """Receives messages and state changes of workers. Called on the fleet's event loop."""

    def on_output(self, address: str, output: TokenOutput) -> None: ...
    def on_prompt_result(self, address: str, result: PromptResult) -> None: ...
    def on_failed(self, address: str, failed: RequestFailed) -> None: ...
    def on_lost(self, address: str, reason: str) -> None:
        """The worker's incarnation ended, and all requests on it have failed."""

    def on_ready(self, address: str) -> None:
        """The worker accepts new requests."""

    def on_abort_all(self) -> None:
        """Another router has ordered that all running requests end."""

    def on_tick(self, now: float) -> None:
        """A heartbeat interval has passed."""

    def uses(self, address: str) -> bool:
        """Return whether a request still needs the worker."""


class WorkerMonitor:
    """Updates `registry` and `index` from messages, and notifies `listener`.

    `greet(address)` sends a hello to a worker, `send(address, message)` any other message.
    """

    def __init__(
        self,
        registry: WorkerRegistry,
        index: PrefixIndex,
        listener: FleetListener,
        greet: Callable[[str], None],
        send: Callable[[str, Message], bool],
    ) -> None:
        self._registry, self._listener, self._greet, self._send = registry, listener, greet, send
        self._reports = BlockReports(index)
        self.events = FleetEvents()
        self.adapters = FleetAdapters(registry)
        self.serving = FleetServing(registry)

    def on_message(self, address: str, message: ToRouter, now: float) -> None:
        match message:
            case TokenOutput():
                self._listener.on_output(address, message)
            case PromptLogprobs() | PooledOutput():
                self._listener.on_prompt_result(address, message)
            case RequestFailed():
                self._listener.on_failed(address, message)
            case WorkerHeartbeat():
                self._on_heartbeat(address, message, now)
            case WorkerHello():
                self._on_hello(address, message, now)
            case BlockEvents():
                self._reports.on_events(address, message)
            case BlockSnapshot():
                self._reports.on_snapshot(address, message)

    def on_cut(self, address: str, now: float) -> None:
        """Process a broken connection."""
        if self._registry.on_cut(address):
            self._lost(address, now)

    def on_gone(self, address: str) -> None:
        """Process the removal of a worker."""
        self._reports.end(address)

    def sweep(self, now: float) -> None:
        """Process workers that are silent or stuck."""
        for worker in self._registry.sweep(now):
            self._lost(worker.address, now)

    # ------------------------------------------------------------ inside

    def _on_hello(self, address: str, hello: WorkerHello, now: float) -> None:
        if hello.lost_router:
            if self._registry.on_forgotten(address):
                self._lost(address, now)
                self._greet(address)
            return
        worker = self._registry.workers[address]
        started, had_served, role = worker.life.known_epoch != hello.epoch, worker.life.has_served, worker.role
        ended = self._registry.on_hello(address, hello, now)
        if worker.role != role:
            log.info("worker %s: role changed from %s to %s", hello.worker_id, role, worker.role)
            self.events.add("role", worker, now, f"was {role}")
        if ended and worker.role != role:
            self._listener.on_lost(address, f"role changed to {worker.role}")
        elif ended:
            self._end_life(address, f"restarted (epoch {hello.epoch})", had_served, now)
        if started:
            log.info(
                "worker %s at %s: connected (KV layout %s, weights %s)",
                hello.worker_id,
                address,
                hello.fingerprint,
                hello.weights or "unknown",
            )
            self._reports.begin(address, hello.epoch)

    def _on_heartbeat(self, address: str, beat: WorkerHeartbeat, now: float) -> None:
        worker = self._registry.workers[address]
        was_ready = worker.ready
        if self._reports.begin_snapshot(address, beat, now):
            self._send(address, BlockSnapshotRequest(epoch=beat.epoch))
        if self._registry.on_heartbeat(address, beat, now):
            self._lost(address, now)
        if worker.hello is None:
            self._greet(address)
        else:
            for order in self.adapters.on_heartbeat(beat, worker.hello.max_loras):
                self._send(address, order)
            self._follow_serving(worker, beat)
        if worker.ready and not was_ready:
            log.info("%s", worker.describe(now))
            self.events.add("ready", worker, now)
            self._listener.on_ready(address)

    def _follow_serving(self, worker: Worker, beat: WorkerHeartbeat) -> None:
        missed, aborts = self.serving.on_heartbeat(worker, beat)
        if missed is not None:
            self._send(worker.address, missed)
        if aborts:
            self._listener.on_abort_all()

    def _lost(self, address: str, now: float) -> None:
        worker = self._registry.workers[address]
        self._end_life(address, worker.reason, worker.life.has_served, now)

    def _end_life(self, address: str, reason: str, had_served: bool, now: float) -> None:
        worker = self._registry.workers[address]
        self.events.add("lost", worker, now, reason)
        if had_served:
            log.warning("%s: lost: %s", worker.name, reason)
        else:
            log.info("%s: lost before it was ready: %s", worker.name, reason)
        self._listener.on_lost(address, reason)
