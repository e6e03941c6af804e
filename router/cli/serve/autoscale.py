"""Carries out the router's plan on one machine: starts workers of each model, and ends those that are too many."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Protocol

from common.wire import Role
from router.cli.serve.child import RouterChild, WorkerChild
from router.cli.serve.pools import Gauges, LocalPools
from router.cli.serve.probe import metrics_page

log = logging.getLogger(__name__)

LOOK_S = 2.0
"""Between two looks at what the planner wants, whose own interval is longer."""


class Staff(Protocol):
    """The supervisor, which starts and ends workers."""

    def start_worker(self, role: Role, model: str) -> None: ...
    def end_worker(self, worker: WorkerChild) -> None: ...


class LocalScaler:
    """A `Scaler` of this machine's workers of one model. `requests` says how many requests each worker has."""

    def __init__(self, staff: Staff, pools: LocalPools, model: str) -> None:
        """`model`: the setting of its workers."""
        self._staff, self._pools, self._model = staff, pools, model
        self.requests: Mapping[str, float] = {}
        self.unschedulable: Mapping[Role, int] = {}

    async def scale(self, wanted: Mapping[Role, int]) -> None:
        """Start or end workers at once; they become ready, or leave, on their own."""
        for role, num in wanted.items():
            present = len(self._pools.staying(role, self._model))
            if present != num:
                what = "started" if num > present else "ended"
                told = {"model": self._model, "role": role, "workers": num, "before": present}
                log.info("workers are %s", what, extra=told)
            for _ in range(num - present):
                self._staff.start_worker(role, self._model)
            for _ in range(present - num):
                self._staff.end_worker(self._pools.least_busy(role, self._model, self.requests))

    async def close(self) -> None:
        """The supervisor owns the processes."""


async def autoscale(staff: Staff, pools: LocalPools, router: RouterChild, models: Mapping[str, str]) -> None:
    """Follow the router's plan until cancelled. While the router does not answer, nothing changes.

    `models`: the name by which clients call a model, and the setting of its workers.
    """
    scalers = {name: LocalScaler(staff, pools, model) for name, model in models.items()}
    while True:
        pools.publish()  # workers that have said where they are since
        page = await metrics_page(router.config.host, router.config.port, tls=router.serves_tls)
        gauges = Gauges.of(page)
        for name, scaler in scalers.items():
            scaler.requests = gauges.requests
            planned = {role: gauges.wanted.get((name, role)) for role in pools.workers}
            await scaler.scale({role: num for role, num in planned.items() if num is not None})
        await asyncio.sleep(LOOK_S)
