"""Supervisor of `diptych serve`: start all processes, restart them, and add or remove workers."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.wire import Role
from router.cli.serve.autoscale import LocalPools, autoscale
from router.cli.serve.child import Child, RouterChild, WorkerChild
from router.cli.serve.keeper import POLL_S, Keeper, StartFailed, cancel, describe_exit
from router.cli.serve.liveness import ROUTER_ROUNDS, WORKER_ROUNDS, loading
from router.cli.serve.on_demand import load_on_demand
from router.cli.serve.probe import PROBE_TIMEOUT_S, ready_reason
from router.cli.serve.processes import ServePlan
from router.planner import OnDemandFolder

log = logging.getLogger(__name__)

STOP_GRACE_S = 4.0
"""Time from SIGTERM to SIGKILL."""
LEAVE_S = 0.5
"""Time for the router to read that a worker is stopping, before SIGTERM."""
REPORT_EVERY_S = 10.0
"""Log interval during a slow start."""
SLOW_STARTS = {
    "diptych": "the first start on a machine compiles kernels for up to a minute",
    "vllm": "vLLM compiles and measures the model for a minute or more at each start",
}


class Supervisor(Keeper):
    """Owner of all processes of the service."""

    def __init__(self, plan: ServePlan, names: Sequence[str], runtime: Path) -> None:
        """`names` are the API names of the models of the plan."""
        period_s = plan.liveness_s / WORKER_ROUNDS
        super().__init__(period_s=period_s, start_s=plan.start_timeout_s, grace_s=STOP_GRACE_S)
        self.plan, self._names = plan, tuple(names)
        self.pools = LocalPools(plan.kinds, runtime)
        self.prefill = [self.pools.add("prefill", config) for config in plan.prefill]
        self.decode = [self.pools.add("decode", config) for config in plan.decode]
        self.router = RouterChild(plan.router)
        self._runtime = runtime
        self._awaited, self._next_report = "", 0.0

    @property
    def workers(self) -> tuple[WorkerChild, ...]:
        return tuple(self.pools)

    @property
    def children(self) -> tuple[Child, ...]:
        return (self.router, *self.pools)

    def rounds_of(self, child: Child) -> int:
        return ROUTER_ROUNDS if child is self.router else WORKER_ROUNDS

    def begin(self) -> None:
        if self.plan.autoscale:
            models = dict(zip(self._names, self.plan.models, strict=True))
            self.own(None, autoscale(self, self.pools, self.router, models), "autoscale")
        if self.plan.on_demand is not None:
            follow = load_on_demand(self, self.pools, self._runtime, self.plan.start_timeout_s)
            self.own(None, follow, "load on demand")

    async def start(self) -> float:
        """Start all processes and return the seconds until the service is ready. Raises StartFailed."""
        began = time.monotonic()
        self._next_report = began + REPORT_EVERY_S
        for worker in self.workers:
            worker.start()
        limit_s = self.plan.start_timeout_s
        try:
            async with asyncio.timeout(limit_s or None):
                await self.unless_stopped(self._start_router(), self.workers)
        except TimeoutError:
            raise StartFailed(f"not ready within {limit_s:g} s (--start-timeout-s): {self._awaited}") from None
        return time.monotonic() - began

    def stop(self) -> None:
        self.router.close()  # reject new connections while the router stops
        super().stop()

    # ------------------------------------------------------------ autoscaling

    def start_worker(self, role: Role, model: str) -> None:
        """Start one more worker of a model and supervise it."""
        worker = self.pools.add(role, model=model)
        try:
            worker.start()
        except OSError as error:
            log.error("supervisor: cannot start %s: %s", worker.name, error.strerror, extra={"child": worker.name})
            self.pools.remove(worker)
            return
        self.guard(worker)

    def end_worker(self, worker: WorkerChild) -> None:
        """Stop a worker after it has handed over its streams, and remove it."""
        self.pools.leaving.add(worker)
        self.pools.publish()
        guards = self.release(worker)
        self.own(None, self._end_worker(worker, guards), f"end {worker.name}")

    async def _end_worker(self, worker: WorkerChild, guards: list[asyncio.Task[None]]) -> None:
        await cancel(guards)
        await asyncio.sleep(LEAVE_S)
        await worker.end(worker.config.drain_timeout_s + STOP_GRACE_S)
        self.pools.remove(worker)
        log.info("supervisor: removed %s", worker.name, extra={"child": worker.name})

    async def _start_router(self) -> None:
        while starting := [worker.name for worker in self.workers if not worker.read_address()]:
            self._awaited = f"waiting for {', '.join(starting)} to start"
            await self._wait_on()
        if self.plan.on_demand is not None:
            OnDemandFolder(self._runtime).write_settings(self.plan.on_demand)
            found: dict[str, Any] = {"on_demand_folder": str(self._runtime)}
        elif self.plan.autoscale:
            self.pools.publish()
            found = {"discovery": "file", "discovery_file": str(self.pools.file)}
        else:
            pools = {"prefill": self.prefill, "decode": self.decode}
            found = {role: tuple(worker.read_address() for worker in pool) for role, pool in pools.items()}
        self.router.config = dataclasses.replace(self.plan.router, **found)
        router = self.plan.router
        try:
            self.router.start()
        except OSError as error:  # for example if another program has bound the port in the meantime
            raise StartFailed(f"the router cannot listen on {router.host}:{router.port}: {error.strerror}") from error
        several = len(self.plan.models) > 1
        for model in self.plan.models if several else ("",):
            while reason := await ready_reason(router.host, router.port, tls=bool(router.tls_cert), model=model):
                if not self.router.alive:
                    raise StartFailed(f"router exited during startup ({describe_exit(await self.router.ended())})")
                self._awaited = reason
                await self._wait_on()

    async def _wait_on(self) -> None:
        """Wait for a poll interval, and log what a slow start waits for."""
        now = time.monotonic()
        if now >= self._next_report:
            names = await loading(self.workers, PROBE_TIMEOUT_S)
            slow = SLOW_STARTS[self.plan.engine]
            more = f"; {', '.join(names)} loading the model ({slow})" if names else ""
            log.info("supervisor: still starting: %s%s", self._awaited, more)
            self._next_report = time.monotonic() + REPORT_EVERY_S
        await asyncio.sleep(POLL_S)
