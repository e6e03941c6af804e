"""Keeps the processes of one machine running: starts them in order, restarts with backoff those that end or hang."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import signal
import time
from collections.abc import Coroutine, Iterable
from pathlib import Path
from typing import Any

from common.errors import DiptychError
from common.wire.message_fields import Role
from router.local.autoscale import autoscale
from router.local.child import Child, RouterChild, WorkerChild
from router.local.liveness import ROUTER_ROUNDS, WORKER_ROUNDS, watch
from router.local.pools import LocalPools
from router.local.probe import ready_reason
from router.local.processes import ServePlan

log = logging.getLogger(__name__)

STOP_GRACE_S = 4.0
"""From SIGTERM to SIGKILL."""
POLL_S = 0.05
LEAVE_S = 0.5
"""From a worker being listed as leaving to SIGTERM: the router has read it by then."""
REPORT_EVERY_S = 10.0
"""How often the log names what a slow start waits for."""
ECHO_S = 0.5
"""A signal this soon after the first repeats it: `make` passes on to its children a signal that its whole group got."""
FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.5, 30.0
HEALTHY_AFTER_S = 60.0
"""A process that lived this long is restarted after the first backoff again."""


class StartFailed(DiptychError):
    """A process ended or hung before the service was ready, and would do so again after a restart."""


def describe_exit(status: int) -> str:
    """An exit status in words."""
    if status >= 0:
        return f"exit status {status}"
    return f"killed by signal {-status} ({signal.strsignal(-status)})"


async def _cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel the tasks that still run and wait for them; the caller reads the results of those that finished."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Supervisor:
    """Owns every child process. `run` returns after `stop` was called and every child has ended."""

    def __init__(self, plan: ServePlan, runtime: Path) -> None:
        self.plan = plan
        self.pools = LocalPools(plan.kinds, runtime)
        self.prefill = [self.pools.add("prefill", config) for config in plan.prefill]
        self.decode = [self.pools.add("decode", config) for config in plan.decode]
        self.router = RouterChild(plan.router)
        self.stopping = asyncio.Event()
        self._tasks: dict[Child | None, list[asyncio.Task[None]]] = {}
        self._broken: asyncio.Future[None] | None = None
        self._stopped_at = 0.0
        self._awaited, self._next_report = "", 0.0

    @property
    def workers(self) -> tuple[WorkerChild, ...]:
        return tuple(self.pools)

    @property
    def children(self) -> tuple[Child, ...]:
        return (self.router, *self.pools)

    def stop(self) -> None:
        """End the service; a second call, unless it echoes the first, kills what still runs."""
        now = time.monotonic()
        if not self.stopping.is_set():
            self._stopped_at = now
        elif now - self._stopped_at >= ECHO_S:
            self._signal_all(signal.SIGKILL)
        self.stopping.set()

    async def start(self) -> float:
        """Start every process and return the seconds until the service was ready. Raises StartFailed."""
        began = time.monotonic()
        self._next_report = began + REPORT_EVERY_S
        for worker in self.workers:
            worker.start()
        limit_s = self.plan.start_timeout_s
        try:
            async with asyncio.timeout(limit_s or None):
                await self._unless_stopped(self._start_router())
        except TimeoutError:
            raise StartFailed(f"not ready within {limit_s:g} s (--start-timeout-s): {self._awaited}") from None
        return time.monotonic() - began

    async def run(self) -> None:
        """Restart processes that end or hang until `stop` is called, then end them all."""
        stopped = asyncio.create_task(self.stopping.wait())
        self._broken = asyncio.get_running_loop().create_future()
        for child in self.children:
            self._guard(child)
        if self.plan.autoscale:
            self._own(None, autoscale(self, self.pools, self.router), "autoscale")
        await asyncio.wait((stopped, self._broken), return_when=asyncio.FIRST_COMPLETED)
        await _cancel((stopped, *(task for tasks in self._tasks.values() for task in tasks)))
        await self.shutdown()
        if self._broken.done():
            self._broken.result()
        self._broken.cancel()

    # ------------------------------------------------------------ workers that come and go

    def start_worker(self, role: Role) -> None:
        """Start one more worker, which is kept and watched like the first ones."""
        worker = self.pools.add(role)
        try:
            worker.start()
        except OSError as error:
            log.error("a worker cannot be started", extra={"child": worker.name, "why": error.strerror})
            self.pools.remove(worker)
            return
        self._guard(worker)

    def end_worker(self, worker: WorkerChild) -> None:
        """Let a worker hand its streams over and end, and forget it then."""
        self.pools.leaving.add(worker)
        self.pools.publish()
        guards = self._tasks.pop(worker, [])
        self._own(None, self._end_worker(worker, guards), f"end {worker.name}")

    async def _end_worker(self, worker: WorkerChild, guards: list[asyncio.Task[None]]) -> None:
        await _cancel(guards)
        await asyncio.sleep(LEAVE_S)
        await worker.end(worker.config.drain_timeout_s + STOP_GRACE_S)
        self.pools.remove(worker)
        log.info("a worker has left", extra={"child": worker.name})

    def _own(self, child: Child | None, work: Coroutine[None, None, None], name: str) -> None:
        """Run `work`; if it fails the service ends with its error."""
        task = asyncio.create_task(work, name=name)
        owned = self._tasks.setdefault(child, [])
        owned.append(task)
        task.add_done_callback(lambda done: self._on_done(done, owned))

    def _on_done(self, task: asyncio.Task[None], owned: list[asyncio.Task[None]]) -> None:
        owned.remove(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if self._broken is not None and not self._broken.done():
            self._broken.set_exception(error)

    async def shutdown(self) -> None:
        """SIGTERM to all processes, SIGKILL after STOP_GRACE_S to those that are left."""
        self.stopping.set()
        running = [child for child in self.children if child.alive]
        self._signal_all(signal.SIGTERM)
        ended = asyncio.gather(*(child.ended() for child in running))
        try:
            await asyncio.wait_for(asyncio.shield(ended), STOP_GRACE_S)
        except TimeoutError:
            late = ", ".join(child.name for child in running if child.alive)
            log.warning("killed what did not end by itself", extra={"children": late, "waited_s": STOP_GRACE_S})
            self._signal_all(signal.SIGKILL)
            await ended

    def _signal_all(self, signum: signal.Signals) -> None:
        for child in self.children:
            child.send_signal(signum)

    async def _unless_stopped(self, work: Coroutine[None, None, None]) -> None:
        """Await `work`, but raise StartFailed when a worker ends, and return when `stop` is called."""
        task = asyncio.create_task(work)
        stopped = asyncio.create_task(self.stopping.wait())
        exits = {asyncio.create_task(child.ended()): child for child in self.workers}
        try:
            await asyncio.wait({task, stopped, *exits}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
            elif not stopped.done():
                ended, child = next((exit, child) for exit, child in exits.items() if exit.done())
                raise StartFailed(f"{child.name} ended while starting ({describe_exit(ended.result())})")
        finally:
            await _cancel((task, stopped, *exits))

    async def _start_router(self) -> None:
        while silent := [worker.name for worker in self.workers if not worker.read_address()]:
            self._awaited = f"{', '.join(silent)} wrote no address yet"
            await self._wait_on()
        if self.plan.autoscale:
            self.pools.publish()
            found: dict[str, Any] = {"discovery": "file", "discovery_file": str(self.pools.file)}
        else:
            pools = {"prefill": self.prefill, "decode": self.decode}
            found = {role: tuple(worker.read_address() for worker in pool) for role, pool in pools.items()}
        self.router.config = dataclasses.replace(self.plan.router, **found)
        self.router.start()
        router = self.plan.router
        several = len(self.plan.models) > 1
        for model in self.plan.models if several else ("",):
            while reason := await ready_reason(router.host, router.port, tls=bool(router.tls_cert), model=model):
                if not self.router.alive:
                    raise StartFailed(f"router ended while starting ({describe_exit(await self.router.ended())})")
                self._awaited = reason
                await self._wait_on()

    async def _wait_on(self) -> None:
        """Wait a little, and log now and then what the start waits for."""
        now = time.monotonic()
        if now >= self._next_report:
            log.info("still starting", extra={"reason": self._awaited})
            self._next_report = now + REPORT_EVERY_S
        await asyncio.sleep(POLL_S)

    def _guard(self, child: Child) -> None:
        """Restart `child` when it ends, and end it when it hangs, unless `liveness_s` is 0."""
        self._own(child, self._keep(child), f"keep {child.name}")
        if self.plan.liveness_s:
            limit = ROUTER_ROUNDS if child is self.router else WORKER_ROUNDS
            period_s, start_s = self.plan.liveness_s / WORKER_ROUNDS, self.plan.start_timeout_s or math.inf
            self._own(child, watch(child, limit, period_s, STOP_GRACE_S, start_s), f"watch {child.name}")

    async def _keep(self, child: Child) -> None:
        """Restart `child` each time it ends, with a growing delay unless it had lived for a while.

        A restart that the machine refuses, for lack of memory for example, is tried again; the other children serve on.
        """
        backoff = FIRST_BACKOFF_S
        while True:
            status = await child.ended()
            lived_s = time.monotonic() - child.started_at
            backoff = FIRST_BACKOFF_S if lived_s >= HEALTHY_AFTER_S else backoff
            log.error(
                "a process ended, restarting it",
                extra={"child": child.name, "why": describe_exit(status), "lived_s": lived_s, "wait_s": backoff},
            )
            while True:
                await asyncio.sleep(backoff)
                backoff = min(2 * backoff, LONGEST_BACKOFF_S)
                try:
                    child.start()
                    break
                except OSError as error:
                    why = {"child": child.name, "why": error.strerror, "wait_s": backoff}
                    log.error("a process cannot be started, trying again", extra=why)
