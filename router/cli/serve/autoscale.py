"""Autoscaling on one machine: start and stop workers according to the router's plan."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

from prometheus_client.parser import text_string_to_metric_families

from common.config import WorkerConfig
from common.machine import MemoryFile, write_failure
from common.wire import Role
from router.cli.serve.child import RouterChild, WorkerChild
from router.cli.serve.probe import metrics_page

log = logging.getLogger(__name__)


MODULES: Mapping[Role, str] = {"prefill": "prefill_worker", "decode": "decode_worker"}
WANTED, REQUESTS = "diptych_pool_wanted_workers", "diptych_worker_requests"
LOOK_S = 2.0
"""Interval between two reads of the plan, shorter than that of the planner."""


@dataclasses.dataclass(frozen=True, slots=True)
class Gauges:
    """Metrics of the router: planned workers by model name and role, and requests by worker."""

    wanted: Mapping[tuple[str, str], int]
    requests: Mapping[str, float]

    @classmethod
    def of(cls, page: str) -> Gauges:
        whole = page.rpartition("\n")[0]  # the last line is incomplete if the router died
        lines = "\n".join(line for line in whole.splitlines() if line.startswith((WANTED, REQUESTS)))
        samples = [sample for family in text_string_to_metric_families(lines + "\n") for sample in family.samples]
        wanted: Counter[tuple[str, str]] = Counter()
        requests: Counter[str] = Counter()
        for one in samples:  # each router process plans for the whole load and counts its own requests
            if one.name == WANTED:
                pool = one.labels["model_name"], one.labels["role"]
                wanted[pool] = max(wanted[pool], int(one.value))
            elif one.name == REQUESTS:
                requests[one.labels["worker"]] += int(one.value)
        return cls(wanted, requests)


class LocalPools:
    """All workers by role, including those that are stopping. `kinds` holds the settings of new workers."""

    def __init__(self, kinds: Mapping[Role, WorkerConfig], runtime: Path) -> None:
        self._kinds, self._runtime = kinds, runtime
        self._weights: dict[str, MemoryFile] = {}
        """Weights that the workers of a model share. Dropped with the last of them."""
        self.file = runtime / "workers.json"
        self.workers: dict[Role, list[WorkerChild]] = {role: [] for role in MODULES}
        self.leaving: set[WorkerChild] = set()
        self._listed = ""
        self._is_failing = False

    def add(self, role: Role, config: WorkerConfig | None = None, model: str = "") -> WorkerChild:
        """Create a worker without starting it; without `config`, one of the role's kind that serves `model`.

        Its name has the lowest free number of the role, because files and metrics identify workers by name.
        """
        if config is None:
            names = {worker.name for worker in self.workers[role]}
            number = next(number for number in range(len(names) + 1) if f"{role}-{number}" not in names)
            config = dataclasses.replace(self._kinds[role], worker_id=f"{role}-{number}", model=model)
        if not config.cores and config.engine == "diptych":  # workers without pinned cores share all cores
            config = dataclasses.replace(config, core_share=str(self._runtime / "cores"))
        if not config.on_gpu and config.engine == "diptych":
            config = dataclasses.replace(config, weight_share=self._weights_of(config.model).path)
        other = next((kind for name, kind in self._kinds.items() if name != role), None)
        name = config.worker_id
        worker = WorkerChild(
            MODULES[role], _with_own_file(config, name), self._runtime, other and _with_own_file(other, name)
        )
        self.workers[role].append(worker)
        return worker

    def remove(self, worker: WorkerChild) -> None:
        """Remove a worker that has exited."""
        worker.close()
        self.leaving.discard(worker)
        for pool in self.workers.values():
            if worker in pool:
                pool.remove(worker)
        if worker.config.model not in {other.config.model for other in self}:
            self._weights.pop(worker.config.model, None)
        self.publish()

    def _weights_of(self, model: str) -> MemoryFile:
        if model not in self._weights:
            self._weights[model] = MemoryFile("diptych-weights")
        return self._weights[model]

    def __iter__(self) -> Iterator[WorkerChild]:
        return iter([worker for pool in self.workers.values() for worker in pool])

    def staying(self, role: Role, model: str) -> list[WorkerChild]:
        """Return the workers of a model that are not stopping."""
        of_model = (worker for worker in self.workers[role] if worker.config.model == model)
        return [worker for worker in of_model if worker not in self.leaving]

    def least_busy(self, role: Role, model: str, requests: Mapping[str, float]) -> WorkerChild:
        """Return the worker of a model to stop first: the one with the fewest requests, then the newest."""
        return min(self.staying(role, model), key=lambda worker: (requests.get(worker.name, 0.0), -worker.started_at))

    def publish(self) -> None:
        """Update the file if the workers' published addresses have changed."""
        addresses = {worker: worker.read_address() for pool in self.workers.values() for worker in pool}
        listed: dict[str, list[str]] = {
            role: [addresses[worker] for worker in pool if addresses[worker]] for role, pool in self.workers.items()
        }
        listed["leaving"] = sorted(addresses[worker] for worker in self.leaving if addresses.get(worker))
        text = json.dumps(listed)
        if text != self._listed:
            new = self.file.with_suffix(".new")
            try:
                new.write_text(text)
                new.replace(self.file)
            except OSError as error:  # on a full disk the service continues, and the next call retries
                if not self._is_failing:
                    log.error("supervisor: %s; will retry", write_failure(self.file, error, len(text)))
                self._is_failing = True
                return
            self._listed, self._is_failing = text, False


def _with_own_file(config: WorkerConfig, name: str) -> WorkerConfig:
    """Append the worker's name to its KV file, because workers cannot share one."""
    if not config.kv_disk_path:
        return config
    return dataclasses.replace(config, kv_disk_path=f"{config.kv_disk_path}.{name}")


class WorkerManager(Protocol):
    """Interface of the supervisor for autoscaling."""

    def start_worker(self, role: Role, model: str) -> None: ...
    def end_worker(self, worker: WorkerChild) -> None: ...


class LocalScaler:
    """A `Scaler` of the workers of one model. `requests` is the number of requests per worker."""

    def __init__(self, manager: WorkerManager, pools: LocalPools, model: str) -> None:
        """`model` is the `--model` of the workers."""
        self._manager, self._pools, self._model = manager, pools, model
        self.requests: Mapping[str, float] = {}
        self.unschedulable: Mapping[Role, int] = {}

    async def scale(self, wanted: Mapping[Role, int]) -> None:
        """Start or stop workers without waiting until they are ready or have exited."""
        for role, num in wanted.items():
            present = len(self._pools.staying(role, self._model))
            if present != num:
                action = "adding" if num > present else "removing"
                fields = {"model": self._model, "role": role, "workers": num, "before": present}
                log.info("supervisor: %s %s workers", action, role, extra=fields)
            for _ in range(num - present):
                self._manager.start_worker(role, self._model)
            for _ in range(present - num):
                self._manager.end_worker(self._pools.least_busy(role, self._model, self.requests))

    async def close(self) -> None:
        """The supervisor owns the processes."""


async def autoscale(manager: WorkerManager, pools: LocalPools, router: RouterChild, models: Mapping[str, str]) -> None:
    """Follow the router's plan until cancelled. Nothing changes while the router does not answer.

    `models` maps the API name of a model to the `--model` of its workers.
    """
    scalers = {name: LocalScaler(manager, pools, model) for name, model in models.items()}
    while True:
        pools.publish()  # includes workers whose address is now known
        page = await metrics_page(router.config.host, router.config.port, tls=router.serves_tls)
        gauges = Gauges.of(page)
        for name, scaler in scalers.items():
            scaler.requests = gauges.requests
            planned = {role: gauges.wanted.get((name, role)) for role in pools.workers}
            await scaler.scale({role: num for role, num in planned.items() if num is not None})
        await asyncio.sleep(LOOK_S)
