"""Load on demand: start and stop the workers of the models that the router wants.

A load fails when one of its workers exits before all are ready: the others are stopped, and nothing is restarted. The
router tries again when a request arrives after a pause. Workers of a loaded model are restarted like others.
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Protocol

import msgspec

from common.wire import Role
from router.cli.serve.autoscale import LocalPools
from router.cli.serve.child import WorkerChild
from router.cli.serve.keeper import describe_exit
from router.planner import LOOK_S, ModelReport, OnDemandFolder, Report, WantedModel

log = logging.getLogger(__name__)


class WorkerManager(Protocol):
    """Interface of the supervisor for load on demand."""

    def guard(self, child: WorkerChild) -> None: ...
    def end_worker(self, worker: WorkerChild) -> None: ...


class ModelLoad:
    """One load of a model, from the start of its workers until all have exited."""

    def __init__(self, manager: WorkerManager, pools: LocalPools, wanted: WantedModel) -> None:
        self.wanted, self.failure = wanted, ""
        self._manager, self._pools = manager, pools
        self.workers: list[WorkerChild] = []
        self._began, self._is_guarded, self.is_ending = time.monotonic(), False, False

    def start(self) -> None:
        """Start the workers."""
        for role, num in self.wanted.roles.items():
            for _ in range(num):
                worker = self._pools.add(role, model=self.wanted.model)
                worker.keeps_errors = True
                self.workers.append(worker)
                try:
                    worker.start()
                except OSError as error:
                    self._fail(f"{worker.name} cannot be started: {error.strerror}")
                    return

    async def look(self, start_s: float) -> None:
        """Check the workers of a load that is not ending. It may take `start_s` seconds, 0 for no limit."""
        if self.wanted.is_ready and not self._is_guarded:
            for worker in self.workers:
                self._manager.guard(worker)
            self._is_guarded = True
        if self._is_guarded:
            return
        for worker in self.workers:
            if (status := worker.returncode) is not None:
                last = await worker.last_error()
                self._fail(f"{worker.name} exited while it loaded ({describe_exit(status)}){last and f': {last}'}")
                return
        if start_s and time.monotonic() - self._began > start_s:
            self._fail(f"not ready within {start_s:g} s (--start-timeout-s)")

    def end(self) -> None:
        """Stop all workers."""
        if not self.is_ending:
            self.is_ending = True
            for worker in self.workers:
                self._manager.end_worker(worker)

    @property
    def has_ended(self) -> bool:
        return self.is_ending and not any(worker in self.workers for worker in self._pools)

    def report(self) -> ModelReport | None:
        """Return the state of the load; None if nothing is left of it."""
        if self.has_ended:
            failed = ModelReport(self.wanted.model, self.wanted.load, failure=self.failure)
            return failed if self.failure else None
        pools = self._addresses("prefill"), self._addresses("decode")
        return ModelReport(self.wanted.model, self.wanted.load, *(((), ()) if self.is_ending else pools))

    def _addresses(self, role: Role) -> tuple[str, ...]:
        pool = self._pools.workers[role]
        return tuple(address for worker in pool if worker in self.workers and (address := worker.read_address()))

    def _fail(self, reason: str) -> None:
        log.error("supervisor: cannot load %s: %s", self.wanted.model, reason)
        self.failure = reason
        self.end()


async def load_on_demand(manager: WorkerManager, pools: LocalPools, folder: Path, start_s: float) -> None:
    """Follow the wanted models until cancelled. `start_s` is the maximum start time of a worker, 0 for no limit."""
    exchange, loads = OnDemandFolder(folder), dict[str, ModelLoad]()
    is_failing = False
    while True:
        try:
            wanted = {one.model: one for one in exchange.wanted().models}
            await _follow(manager, pools, loads, wanted, start_s)
            exchange.write_report(Report(tuple(filter(None, (load.report() for load in loads.values())))))
            is_failing = False
        except (OSError, msgspec.MsgspecError) as error:  # such as a full disk: the next look retries
            if not is_failing:
                log.error("supervisor: cannot follow the router, will retry: %s", error)
            is_failing = True
        await asyncio.sleep(LOOK_S)


async def _follow(
    manager: WorkerManager,
    pools: LocalPools,
    loads: dict[str, ModelLoad],
    wanted: dict[str, WantedModel],
    start_s: float,
) -> None:
    for model, load in list(loads.items()):
        if (one := wanted.get(model)) is None or one.load != load.wanted.load:
            load.end()
            if load.has_ended:
                del loads[model]
        elif not load.is_ending:
            load.wanted = one
            await load.look(start_s)
    for model, one in wanted.items():
        if model not in loads:
            log.info("supervisor: loading %s", model, extra={"workers": sum(one.roles.values())})
            loads[model] = ModelLoad(manager, pools, one)
            loads[model].start()
