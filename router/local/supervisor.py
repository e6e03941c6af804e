"""Keeps the processes of one machine running: starts them in order, restarts with backoff those that end or hang."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import signal
import time
from collections.abc import Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from common.config import WorkerConfig
from common.errors import DiptychError
from router.local.child import Child, RouterChild, WorkerChild
from router.local.liveness import ROUTER_ROUNDS, WORKER_ROUNDS, watch
from router.local.probe import ready_reason
from router.local.processes import ServePlan

W = TypeVar("W", bound=WorkerConfig)
log = logging.getLogger(__name__)

STOP_GRACE_S = 4.0
"""From SIGTERM to SIGKILL."""
POLL_S = 0.05
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


def _sharing(config: W, runtime: Path) -> W:
    """Workers that are not pinned to cores take turns with all of them."""
    return config if config.cores else dataclasses.replace(config, core_share=str(runtime / "cores"))


def _children(
    module: str, configs: Sequence[WorkerConfig], other: WorkerConfig | None, runtime: Path
) -> list[WorkerChild]:
    """The workers of a pool; `other` are the settings of the other pool."""
    return [WorkerChild(module, _sharing(config, runtime), runtime, other) for config in configs]


class Supervisor:
    """Owns every child process. `run` returns after `stop` was called and every child has ended."""

    def __init__(self, plan: ServePlan, runtime: Path) -> None:
        self.plan = plan
        self.prefill = _children("prefill_worker", plan.prefill, next(iter(plan.decode), None), runtime)
        self.decode = _children("decode_worker", plan.decode, next(iter(plan.prefill), None), runtime)
        self.router = RouterChild(plan.router)
        self.workers = (*self.prefill, *self.decode)
        self.children: tuple[Child, ...] = (self.router, *self.workers)
        self.stopping = asyncio.Event()
        self._stopped_at = 0.0
        self._awaited, self._next_report = "", 0.0

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
        keepers = [asyncio.create_task(self._keep(child), name=f"keep {child.name}") for child in self.children]
        tasks = (stopped, *keepers, *self._watchers())
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        await _cancel(tasks)
        await self.shutdown()
        for task in done:
            task.result()  # a keeper or watcher ends only by a bug: raise it

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
        self.router.config = dataclasses.replace(
            self.plan.router,
            prefill=tuple(worker.read_address() for worker in self.prefill),
            decode=tuple(worker.read_address() for worker in self.decode),
        )
        self.router.start()
        router = self.plan.router
        while reason := await ready_reason(router.host, router.port, tls=bool(router.tls_cert)):
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

    def _watchers(self) -> list[asyncio.Task[None]]:
        """One for each child; none when `liveness_s` is 0."""
        if not self.plan.liveness_s:
            return []
        period_s, start_s = self.plan.liveness_s / WORKER_ROUNDS, self.plan.start_timeout_s or math.inf
        limits = {child: ROUTER_ROUNDS if child is self.router else WORKER_ROUNDS for child in self.children}
        return [
            asyncio.create_task(watch(child, limit, period_s, STOP_GRACE_S, start_s), name=f"watch {child.name}")
            for child, limit in limits.items()
        ]

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
