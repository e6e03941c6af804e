"""Routers are replaced behind a load balancer while clients reuse their connections."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from benchmarks.stack import free_port

from ...waiting import until
from ..cluster import Cluster

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

LAG_S = 1.0
"""Time from the end of a pod until no node sends it new connections, in seconds."""
NUM_CLIENTS = 12


class Balancer:
    """Forwards each new connection to the next of `ports`, as a Service does. It knows no requests."""

    def __init__(self) -> None:
        self.ports: list[int] = []
        self._turn = 0

    async def forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._turn += 1
        port = self.ports[self._turn % len(self.ports)]
        with contextlib.suppress(ConnectionError):
            there, back = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(_copy(reader, back), _copy(there, writer))
        writer.close()

    async def retire(self, port: int) -> None:
        await asyncio.sleep(LAG_S)
        self.ports.remove(port)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


@pytest.fixture
async def workers() -> AsyncIterator[Cluster]:
    cluster = Cluster()
    for role in ("prefill", "decode", "decode"):
        cluster.add(role).token_s = 0.02
    yield cluster
    await cluster.close()


async def test_no_request_fails_while_all_routers_are_replaced(workers: Cluster, launch: Callable[..., Any]) -> None:
    balancer, failures, num_done, is_over = Balancer(), list[str](), 0, False
    addresses = [
        flag
        for role in ("prefill", "decode")
        for flag in (f"--{role}", ",".join(one.address for one in workers.workers if one.role == role))
    ]

    async def start() -> tuple[Any, int]:
        port = free_port()
        router = launch(sys.executable, "-P", "-m", "router", "--model", "tiny-random", "--port", str(port), *addresses)

        async with httpx.AsyncClient(trust_env=False) as client:

            async def is_ready() -> bool:
                with contextlib.suppress(httpx.TransportError):
                    return (await client.get(f"http://127.0.0.1:{port}/ready")).status_code == 200
                return False

            async with asyncio.timeout(60):
                while not await is_ready():  # noqa: ASYNC110 (another process)
                    await asyncio.sleep(0.05)
        balancer.ports.append(port)
        return router, port

    async def ask_repeatedly(client: httpx.AsyncClient, seed: int) -> None:
        nonlocal num_done
        chance = random.Random(seed)
        while not is_over:
            body = {"prompt": "hi", "max_tokens": chance.randint(1, 60), "stream": chance.random() < 0.5}
            try:
                reply = await client.post("/v1/completions", json=body)
                if reply.status_code != 200 or (body["stream"] and not reply.text.endswith("[DONE]\n\n")):
                    failures.append(f"{reply.status_code} {reply.text[-200:]}")
            except httpx.TransportError as error:
                failures.append(repr(error))
            num_done += 1
            await asyncio.sleep(chance.choice((0.0, 0.05, 0.5)))

    server = await asyncio.start_server(balancer.forward, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    old = await asyncio.gather(start(), start())
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as client, asyncio.TaskGroup() as tasks:
        for seed in range(NUM_CLIENTS):
            tasks.create_task(ask_repeatedly(client, seed))
        for router, port in old:
            await start()
            before = num_done
            await until(lambda before=before: num_done > before + NUM_CLIENTS)
            router.send_signal(signal.SIGTERM)
            await balancer.retire(port)
            await until(lambda router=router: not router.alive)
        is_over = True
    server.close()
    assert not failures, f"{len(failures)} of {num_done} requests failed: {failures[:3]}"
    assert [router.returncode for router, _ in old] == [0, 0] and num_done > 10 * NUM_CLIENTS
