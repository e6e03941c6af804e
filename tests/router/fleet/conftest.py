"""A Kubernetes API server on this machine and a discovery source that watches it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import pytest

from common.cluster.access import ClusterAccess
from common.cluster.api import KubernetesClient
from router.fleet.discovery import Endpoint
from router.fleet.kubernetes_source import KubernetesSource

from ...kubernetes_api import KubernetesAPI
from ..cluster import cluster, tools  # noqa: F401

WAIT_S = 60.0
SERVICES = {"prefill": "prefill", "decode": "decode"}


class Watcher:
    """A source at work, and what it has published."""

    def __init__(self, api: KubernetesAPI, relist_s: float = 60.0, timeout_s: float = 10.0) -> None:
        access = ClusterAccess(api.url, api.folder)
        client = KubernetesClient(access, timeout_s=timeout_s)
        self.source = KubernetesSource(client, api.namespace, SERVICES, self.publish, relist_s=relist_s)
        self.endpoints: tuple[Endpoint, ...] | None = None
        self.task = asyncio.create_task(self.source.run())

    def publish(self, endpoints: Sequence[Endpoint]) -> None:
        self.endpoints = tuple(endpoints)

    @property
    def addresses(self) -> list[str] | None:
        return None if self.endpoints is None else [endpoint.address for endpoint in self.endpoints]

    def one(self) -> Endpoint:
        assert self.endpoints is not None
        (endpoint,) = self.endpoints
        return endpoint

    async def until(self, condition: Callable[[], object]) -> None:
        end = time.monotonic() + WAIT_S
        while not condition():
            assert not self.task.done(), self.task.exception()
            assert time.monotonic() < end, f"it did not come true; published: {self.endpoints}"
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


@pytest.fixture
def api(tmp_path: Path) -> Iterator[KubernetesAPI]:
    api = KubernetesAPI(tmp_path / "serviceaccount").start()
    yield api
    api.stop()


@pytest.fixture
async def watch(api: KubernetesAPI) -> AsyncIterator[Callable[..., Watcher]]:
    """Starts sources that end with the test."""
    started: list[Watcher] = []

    def start(**options: float) -> Watcher:
        started.append(Watcher(api, **options))
        return started[-1]

    yield start
    for watcher in started:
        await watcher.close()
