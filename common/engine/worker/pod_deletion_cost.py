"""Tells Kubernetes which pod of a pool to delete first: the one with the fewest requests.

A Deployment that shrinks deletes the pods of lowest `controller.kubernetes.io/pod-deletion-cost` first. It is advice:
failures here never keep requests from being served.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable

from common.cluster import KubernetesClient, KubernetesError
from common.config import WorkerConfig
from common.engine.worker.engine import EngineStatus

log = logging.getLogger(__name__)

ANNOTATION = "controller.kubernetes.io/pod-deletion-cost"
INTERVAL_S = 5.0
"""Between two looks: each change is a write to the API server."""


def cost_of(num_requests: int) -> int:
    """The largest power of two up to `num_requests`: coarse, so that the API server gets few updates."""
    return 1 << (num_requests.bit_length() - 1) if num_requests > 0 else 0


class PodDeletionCost:
    """Keeps one pod's annotation at the number of its requests, in coarse steps, until cancelled."""

    def __init__(
        self, client: KubernetesClient, path: str, num_requests: Callable[[], int], *, interval_s: float = INTERVAL_S
    ) -> None:
        self._client, self._path, self._num_requests = client, path, num_requests
        self._interval_s = interval_s
        self._told: int | None = None
        self._failing = False

    async def run(self) -> None:
        """Run until cancelled."""
        try:
            while True:
                cost = cost_of(self._num_requests())
                if cost != self._told:
                    await self._tell(cost)
                await asyncio.sleep(self._interval_s)
        finally:
            await self._client.close()

    async def _tell(self, cost: int) -> None:
        try:
            await self._client.merge_patch(self._path, {"metadata": {"annotations": {ANNOTATION: str(cost)}}})
        except KubernetesError as error:
            if not self._failing:
                log.warning("pod-deletion-cost is not kept, requests are served all the same: %s", error)
            self._failing = True
        else:
            if self._failing:
                log.info("pod-deletion-cost is kept again")
            self._failing, self._told = False, cost


def keep_pod_deletion_cost(config: WorkerConfig, status: Callable[[], EngineStatus]) -> asyncio.Task[None]:
    """Start to keep the cost of this process's pod; cancel the task to end it. Raises ConfigError."""
    access = config.cluster
    namespace = access.namespace(os.environ.get("POD_NAMESPACE", ""), "POD_NAMESPACE")
    path = f"/api/v1/namespaces/{namespace}/pods/{os.environ['POD_NAME']}"
    keeper = PodDeletionCost(KubernetesClient(access), path, lambda: status().num_active)
    task = asyncio.create_task(keeper.run(), name="pod-deletion-cost")
    task.add_done_callback(_on_end)
    return task


def _on_end(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("pod-deletion-cost is not kept any more", exc_info=error)
