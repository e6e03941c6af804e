"""Carries out the router's plan on one machine: starts workers of each model, and ends those that are too many."""

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
from common.wire import Role
from router.cli.serve.child import RouterChild, WorkerChild
from router.cli.serve.probe import metrics_page

log = logging.getLogger(__name__)


MODULES: Mapping[Role, str] = {"prefill": "prefill_worker", "decode": "decode_worker"}
WANTED, REQUESTS = "diptych_pool_wanted_workers", "diptych_worker_requests"
LOOK_S = 2.0
"""Between two looks at what the planner wants, whose own interval is longer."""


@dataclasses.dataclass(frozen=True, slots=True)
class Gauges:
    """What the router's page of metrics says: workers wanted by model and role, requests by worker.

    A model has the name by which clients call it.
    """

    wanted: Mapping[tuple[str, str], int]
    requests: Mapping[str, float]

    @classmethod
    def of(cls, page: str) -> Gauges:
        whole = page.rpartition("\n")[0]  # of a router that died meanwhile the last line may be a part
        lines = "\n".join(line for line in whole.splitlines() if line.startswith((WANTED, REQUESTS)))
        samples = [sample for family in text_string_to_metric_families(lines + "\n") for sample in family.samples]
        wanted: Counter[tuple[str, str]] = Counter()
        requests: Counter[str] = Counter()
        for one in samples:  # each process of the router plans for the whole load, and has requests of its own
            if one.name == WANTED:
                pool = one.labels["model_name"], one.labels["role"]
                wanted[pool] = max(wanted[pool], int(one.value))
            elif one.name == REQUESTS:
                requests[one.labels["worker"]] += int(one.value)
        return cls(wanted, requests)


class LocalPools:
    """`workers` of all models by role, those that leave included. `kinds`: the settings of a new one, but its model."""

    def __init__(self, kinds: Mapping[Role, WorkerConfig], runtime: Path) -> None:
        self._kinds, self._runtime = kinds, runtime
        self.file = runtime / "workers.json"
        self.workers: dict[Role, list[WorkerChild]] = {role: [] for role in MODULES}
        self.leaving: set[WorkerChild] = set()
        self._listed = ""
        self._is_failing = False

    def add(self, role: Role, config: WorkerConfig | None = None, model: str = "") -> WorkerChild:
        """A new worker, not started yet; without `config` one of the role's kind that serves `model`.

        Its name is the first that no worker of any model has: files and the router's metrics tell workers apart by it.
        """
        if config is None:
            names = {worker.name for worker in self.workers[role]}
            number = next(number for number in range(len(names) + 1) if f"{role}-{number}" not in names)
            config = dataclasses.replace(self._kinds[role], worker_id=f"{role}-{number}", model=model)
        if not config.cores:  # workers that are not pinned to cores take turns with all of them
            config = dataclasses.replace(config, core_share=str(self._runtime / "cores"))
        other = next((kind for name, kind in self._kinds.items() if name != role), None)
        name = config.worker_id
        worker = WorkerChild(
            MODULES[role], _with_own_file(config, name), self._runtime, other and _with_own_file(other, name)
        )
        self.workers[role].append(worker)
        return worker

    def remove(self, worker: WorkerChild) -> None:
        """Forget a worker that has ended."""
        worker.close()
        self.leaving.discard(worker)
        for pool in self.workers.values():
            if worker in pool:
                pool.remove(worker)
        self.publish()

    def __iter__(self) -> Iterator[WorkerChild]:
        return iter([worker for pool in self.workers.values() for worker in pool])

    def staying(self, role: Role, model: str) -> list[WorkerChild]:
        """A model's workers that are not about to leave."""
        of_model = (worker for worker in self.workers[role] if worker.config.model == model)
        return [worker for worker in of_model if worker not in self.leaving]

    def least_busy(self, role: Role, model: str, requests: Mapping[str, float]) -> WorkerChild:
        """A model's worker to end first: that with the fewest requests, the youngest of several."""
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
                    log.error("cannot update the router's list of workers, will retry: %s", error)
                self._is_failing = True
                return
            self._listed, self._is_failing = text, False


def _with_own_file(config: WorkerConfig, name: str) -> WorkerConfig:
    """Two workers cannot keep blocks in one file."""
    if not config.kv_disk_path:
        return config
    return dataclasses.replace(config, kv_disk_path=f"{config.kv_disk_path}.{name}")


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
