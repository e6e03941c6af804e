from __future__ import annotations

import socket
from collections.abc import AsyncIterator

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter

from diptych.common.worker_http import WorkerHTTP, WorkerStatus


class Worker:
    """A worker's status and its HTTP server on a free port."""

    def __init__(self) -> None:
        self.status = WorkerStatus(ready=False, healthy=True, detail={"phase": "loading"})
        registry = CollectorRegistry()
        Counter("diptych_things", "things", registry=registry).inc()
        self.http = WorkerHTTP("127.0.0.1", 0, lambda: self.status, registry)
        self.port = 0

    async def get(self, path: str) -> httpx.Response:
        async with httpx.AsyncClient(trust_env=False) as client:
            return await client.get(f"http://127.0.0.1:{self.port}{path}")


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    worker = Worker()
    worker.port = await worker.http.start()
    yield worker
    await worker.http.stop()


async def test_ready_follows_the_worker(worker: Worker) -> None:
    answer = await worker.get("/ready")
    assert (answer.status_code, answer.json()["phase"]) == (503, "loading")
    worker.status = WorkerStatus(ready=True, healthy=True)
    assert (await worker.get("/ready")).status_code == 200


async def test_an_unhealthy_worker_is_not_ready(worker: Worker) -> None:
    worker.status = WorkerStatus(ready=True, healthy=False)
    assert (await worker.get("/health")).status_code == 503
    assert (await worker.get("/ready")).status_code == 503


async def test_metrics_are_prometheus_text(worker: Worker) -> None:
    answer = await worker.get("/metrics")
    assert "diptych_things_total 1.0" in answer.text
    assert answer.headers["content-type"].startswith("text/plain")


async def test_a_taken_port_is_an_error(worker: Worker) -> None:
    second = WorkerHTTP("127.0.0.1", worker.port, lambda: worker.status, CollectorRegistry())
    with pytest.raises(OSError):
        await second.start()


async def test_stop_frees_the_port_and_may_be_repeated() -> None:
    worker = Worker()
    port = await worker.http.start()
    await worker.http.stop()
    await worker.http.stop()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
