"""Maintains the pod deletion cost, so that Kubernetes first deletes the pod with the fewest requests.

A Deployment that scales down deletes the pods with the lowest `controller.kubernetes.io/pod-deletion-cost` first. The
annotation is only a hint, so failures here never affect requests.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable

from common.cluster import KubernetesClient, KubernetesError
from common.config import WorkerConfig
from common.engine.worker.contract import EngineStatus

log = logging.getLogger(__name__)

ANNOTATION = "controller.kubernetes.io/pod-deletion-cost"
INTERVAL_S = 5.0
"""Update interval, in seconds: each change is a write to the API server."""


def cost_of(num_requests: int) -> int:
    """Return the largest power of two up to `num_requests`: coarse, so that the API server gets few updates."""
    return 1 << (num_requests.bit_length() - 1) if num_requests > 0 else 0


class PodDeletionCost:
    """Keeps the annotation of one pod at its number of requests, in coarse steps, until cancelled."""

    def __init__(
        self, client: KubernetesClient, path: str, num_requests: Callable[[], int], *, interval_s: float = INTERVAL_S
    ) -> None:
        self._client, self._path, self._num_requests = client, path, num_requests
        self._interval_s = interval_s
        self._written: int | None = None
        self._failing = False

    async def run(self) -> None:
        """Run until cancelled."""
        try:
            while True:
                cost = cost_of(self._num_requests())
                if cost != self._written:
                    await self._write(cost)
                await asyncio.sleep(self._interval_s)
        finally:
            await self._client.close()

    async def _write(self, cost: int) -> None:
        try:
            await self._client.merge_patch(self._path, {"metadata": {"annotations": {ANNOTATION: str(cost)}}})
        except KubernetesError as error:
            if not self._failing:
                log.warning("cannot update pod-deletion-cost (does not affect requests): %s", error)
            self._failing = True
        else:
            if self._failing:
                log.info("pod-deletion-cost updates work again")
            self._failing, self._written = False, cost


def keep_pod_deletion_cost(config: WorkerConfig, status: Callable[[], EngineStatus]) -> asyncio.Task[None]:
    """Start maintaining the cost of this process's pod. Cancel the task to stop. Raises ConfigError."""
    access = config.cluster
    namespace = access.namespace(os.environ.get("POD_NAMESPACE", ""), "POD_NAMESPACE")
    path = f"/api/v1/namespaces/{namespace}/pods/{os.environ['POD_NAME']}"
    keeper = PodDeletionCost(KubernetesClient(access), path, lambda: status().num_active)
    task = asyncio.create_task(keeper.run(), name="pod-deletion-cost")
    task.add_done_callback(_on_end)
    return task


def _on_end(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("pod-deletion-cost is no longer updated", exc_info=error)
