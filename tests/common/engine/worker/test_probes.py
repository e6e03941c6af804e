from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter

from common.engine.worker.probes import MAX_CONNECTIONS, ProbeStatus, WorkerHTTP

PATIENCE_S = 60.0


class ProbedWorker:
    """A worker's status and its HTTP server on a free port."""

    def __init__(self, answer_s: float = 60.0) -> None:
        self.status = ProbeStatus(ready=False, healthy=True, detail={"phase": "loading"})
        registry = CollectorRegistry()
        Counter("diptych_things", "things", registry=registry).inc()
        self.http = WorkerHTTP("127.0.0.1", 0, lambda: self.status, registry, answer_s=answer_s)
        self.port = 0

    async def get(self, path: str) -> httpx.Response:
        async with httpx.AsyncClient(trust_env=False, timeout=PATIENCE_S) as client:
            return await client.get(f"http://127.0.0.1:{self.port}{path}")


@pytest.fixture
async def worker() -> AsyncIterator[ProbedWorker]:
    worker = ProbedWorker()
    worker.port = await worker.http.start()
    yield worker
    await worker.http.stop()


async def test_ready_follows_the_worker(worker: ProbedWorker) -> None:
    answer = await worker.get("/ready")
    assert (answer.status_code, answer.json()["phase"]) == (503, "loading")
    worker.status = ProbeStatus(ready=True, healthy=True)
    assert (await worker.get("/ready")).status_code == 200


async def test_an_unhealthy_worker_is_not_ready(worker: ProbedWorker) -> None:
    worker.status = ProbeStatus(ready=True, healthy=False)
    assert (await worker.get("/health")).status_code == 503
    assert (await worker.get("/ready")).status_code == 503


async def test_metrics_are_prometheus_text(worker: ProbedWorker) -> None:
    answer = await worker.get("/metrics")
    assert "diptych_things_total 1.0" in answer.text
    assert answer.headers["content-type"].startswith("text/plain")


async def test_a_taken_port_is_an_error(worker: ProbedWorker) -> None:
    second = WorkerHTTP("127.0.0.1", worker.port, lambda: worker.status, CollectorRegistry())
    with pytest.raises(OSError):
        await second.start()


async def test_stop_frees_the_port_and_may_be_repeated() -> None:
    worker = ProbedWorker()
    port = await worker.http.start()
    await worker.http.stop()
    await worker.http.stop()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


@pytest.fixture
async def hasty_worker() -> AsyncIterator[ProbedWorker]:
    """Waits half a second for a request."""
    worker = ProbedWorker(answer_s=0.5)
    worker.port = await worker.http.start()
    yield worker
    await worker.http.stop()


async def ends(worker: ProbedWorker, *sent: bytes) -> None:
    """Send this and no more; returns when the worker has cut the connection, and raises when it never does."""
    reader, writer = await asyncio.open_connection("127.0.0.1", worker.port)
    try:
        async with asyncio.timeout(PATIENCE_S):
            for piece in sent:
                writer.write(piece)
                await writer.drain()
            while await reader.read(2**16):
                continue
    except ConnectionError:
        pass  # a reset is an end too
    finally:
        writer.transport.abort()


@pytest.mark.slow
@pytest.mark.parametrize("sent", [b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nHost: worker\r\n"])
async def test_who_never_asks_is_cut(hasty_worker: ProbedWorker, sent: bytes) -> None:
    await ends(hasty_worker, sent)
    assert (await hasty_worker.get("/health")).status_code == 200


@pytest.mark.parametrize("begin", [b"GET /", b"GET /health HTTP/1.1\r\nX: ", b"POST /health HTTP/1.1\r\nX: "])
async def test_a_request_without_end_is_cut(worker: ProbedWorker, begin: bytes) -> None:
    await ends(worker, begin, *[b"x" * 4096] * 64)
    assert (await worker.get("/health")).status_code == 200


@pytest.mark.slow
async def test_a_crowd_of_silent_connections_keeps_no_probe_out(worker: ProbedWorker) -> None:
    crowd = [await asyncio.open_connection("127.0.0.1", worker.port) for _ in range(MAX_CONNECTIONS + 20)]
    assert (await worker.get("/health")).status_code == 200
    for reader, _ in crowd[:20]:  # the longest silent made room
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await asyncio.wait_for(reader.readexactly(1), PATIENCE_S)
    for _, writer in crowd:
        writer.transport.abort()
