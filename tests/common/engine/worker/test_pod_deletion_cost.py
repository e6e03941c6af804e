"""A worker's own pod carries what it costs to take it away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from common.cluster.access import ClusterAccess
from common.cluster.api import KubernetesClient
from common.engine.worker.pod_deletion_cost import ANNOTATION, PodDeletionCost, cost_of

from ....kubernetes_api import KubernetesAPI
from ....waiting import until


@pytest.fixture
def api(tmp_path: Path) -> Iterator[KubernetesAPI]:
    api = KubernetesAPI(tmp_path / "serviceaccount").start()
    yield api
    api.stop()


class Load:
    num_requests = 0


@pytest.fixture
async def load(api: KubernetesAPI) -> AsyncIterator[Load]:
    """The load of a pod that keeps its cost."""
    load = Load()
    client = KubernetesClient(ClusterAccess(api.url, api.folder))
    path = f"/api/v1/namespaces/{api.namespace}/pods/decode-7"
    task = asyncio.create_task(PodDeletionCost(client, path, lambda: load.num_requests, interval_s=0.01).run())
    yield load
    assert not task.done()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_costs_are_coarse() -> None:
    assert [cost_of(n) for n in (0, 1, 2, 3, 4, 7, 8, 63, 64)] == [0, 1, 2, 2, 4, 4, 8, 32, 64]


@pytest.mark.slow
async def test_only_changes_are_told(api: KubernetesAPI, load: Load) -> None:
    await until(lambda: api.annotations.get("decode-7") == {ANNOTATION: "0"})
    for load.num_requests in (5, 6, 7):
        await until(lambda: api.annotations["decode-7"] == {ANNOTATION: "4"})
    load.num_requests = 0
    await until(lambda: api.annotations["decode-7"] == {ANNOTATION: "0"})
    assert len(api.patches) == 3


@pytest.mark.slow
async def test_a_refusal_is_said_once_and_tried_again(
    api: KubernetesAPI, load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "common")
    await until(lambda: api.patches)
    api.refusal = 403
    load.num_requests = 9
    await until(lambda: "cannot update pod-deletion-cost" in caplog.text)
    await asyncio.sleep(0.1)
    api.refusal = 0
    await until(lambda: api.annotations["decode-7"] == {ANNOTATION: "8"})
    assert caplog.text.count("cannot update pod-deletion-cost") == 1 and "HTTP 403" in caplog.text
    await until(lambda: "updates work again" in caplog.text)
