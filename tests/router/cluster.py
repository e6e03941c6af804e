"""Workers that follow a script, on real ZeroMQ sockets: everything but the model is as in life."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import pytest
import zmq
import zmq.asyncio

from common.config import RouterConfig
from common.wire.codec import decode, encode
from common.wire.messages import KVTarget, Message, PrefillRequest, RouterHello
from common.wire.sampling_params import SamplingParams
from router.dispatch.client import GenerationRequest, TokenEvent
from router.dispatch.dispatcher import Dispatcher

from ..fake_worker import FakeWorker, Job, Work, expected
from ..waiting import until

PATIENT_S = 3.0
"""Silence that is no worker's fault, on a machine that has other things to do, is shorter. Deaths are told at once."""
SILENT_S = 0.3
"""For tests about silence, which then need not wait for long."""
EPOCHS = itertools.count(1000)
NAMES = itertools.count(1)


class SocketWorker(FakeWorker):
    """One worker: a ROUTER socket, signs of life, and a script that may be changed while it runs."""

    def __init__(self, role: str, cluster: Cluster, **hello: Any) -> None:
        super().__init__(f"{role}-{next(NAMES)}", role, next(EPOCHS), **hello)
        self.cluster, self.beating, self.token_s = cluster, True, 0.0
        self.kv: dict[tuple[str, int], asyncio.Future[list[int]]] = {}
        self.address = ""
        self.open()

    def open(self) -> None:
        self.socket = self.cluster.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self.socket.bind(self.address or "tcp://127.0.0.1:*")
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.tasks: list[asyncio.Task[None]] = []
        self.spawn(self.receive())
        self.spawn(self.live())

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Work that ends with this worker at the latest."""
        self.tasks.append(asyncio.create_task(work))

    def die(self) -> None:
        """As by SIGKILL: everything is gone, nothing is said."""
        for task in self.tasks:
            task.cancel()
        self.jobs.clear()
        self.kv.clear()
        self.routers.clear()
        self.socket.close(linger=0)

    async def restart(self) -> None:
        """A new process on the same address; the port of a closed socket is free a moment later."""
        self.epoch = next(EPOCHS)
        async with asyncio.timeout(60):
            while True:
                try:
                    return self.open()
                except zmq.ZMQError:
                    self.socket.close(linger=0)
                    await asyncio.sleep(0.01)

    async def receive(self) -> None:
        while True:
            router, *parts = await self.socket.recv_multipart()
            message = decode(parts[0])
            if isinstance(message, RouterHello):
                self.routers[router] = 0
                self.send(router, self.hello_message())
                self.send(router, self.heartbeat(router))
            else:
                self.take(router, message)

    async def live(self) -> None:
        while True:
            if self.beating:
                self.step += 1
                for router in self.routers:
                    self.send(router, self.heartbeat(router))
            await asyncio.sleep(0.02)

    def start(self, router: bytes, request: Work) -> Job | None:
        job = super().start(router, request)
        if job is not None:
            self.spawn(self.serve(job))
        return job

    async def serve(self, job: Job) -> None:
        """Advance a request until it ends or is aborted, or leaves with a token that its router had not seen."""
        if isinstance(job.request, PrefillRequest):
            await asyncio.sleep(self.token_s)
        if job.tokens is None:
            job.tokens = list(await self.expect(job.request.request_id, job.request.attempt))
        while self.jobs.get(job.request.request_id) is job:
            if job.order is not None and job.index > job.order.num_output_tokens:
                self.hand_over(job)
            else:
                self.advance(job)
                await asyncio.sleep(self.token_s)

    def expect(self, request_id: str, attempt: int) -> asyncio.Future[list[int]]:
        """The KV of a request: the tokens that it is of."""
        return self.kv.setdefault((request_id, attempt), asyncio.get_running_loop().create_future())

    def send(self, router: bytes, message: Message) -> None:
        self.socket.send_multipart([router, encode(message)])

    def ship(self, request_id: str, attempt: int, target: KVTarget, tokens: list[int]) -> None:
        self.cluster.ship(request_id, attempt, target, tokens)


class Cluster:
    """The workers of one test and the dispatcher in front of them."""

    def __init__(self) -> None:
        self.context = zmq.asyncio.Context()
        self.workers: list[SocketWorker] = []
        self.dispatcher: Dispatcher | None = None

    def add(self, role: str, **hello: object) -> SocketWorker:
        self.workers.append(SocketWorker(role, self, **hello))
        return self.workers[-1]

    def ship(self, request_id: str, attempt: int, target: KVTarget, tokens: list[int]) -> None:
        """The KV of these tokens reaches the target, if that still lives."""
        for worker in self.workers:
            if (worker.worker_id, worker.epoch) == (target.worker_id, target.epoch):
                kv = worker.expect(request_id, attempt)
                if not kv.done():
                    kv.set_result(tokens)

    async def start(
        self, prefill: int = 1, decode: int = 1, *, wait: bool = True, hwm: int = 1000, **config: object
    ) -> Dispatcher:
        for role, count in (("prefill", prefill), ("decode", decode)):
            for _ in range(count):
                self.add(role)
        self.dispatcher = Dispatcher(self.config(**config), hwm=hwm)
        await self.dispatcher.start()
        if wait:
            await until(lambda: all(worker.ready for worker in self.dispatcher.fleet.registry.workers.values()))
        return self.dispatcher

    def config(self, **overrides: object) -> RouterConfig:
        values: dict[str, object] = {
            "prefill": tuple(worker.address for worker in self.workers if worker.role == "prefill"),
            "decode": tuple(worker.address for worker in self.workers if worker.role == "decode"),
            "heartbeat_s": 0.02, "worker_timeout_s": PATIENT_S, "queue_timeout_s": 20.0, "local_prefill_threshold": 4,
        }  # fmt: skip
        return RouterConfig(**(values | overrides))  # type: ignore[arg-type]

    @property
    def prefill(self) -> list[SocketWorker]:
        return [worker for worker in self.workers if worker.role == "prefill"]

    @property
    def decode(self) -> list[SocketWorker]:
        return [worker for worker in self.workers if worker.role == "decode"]

    async def close(self) -> None:
        if self.dispatcher is not None:
            await self.dispatcher.close()
        for worker in self.workers:
            worker.die()
        self.context.term()


def make_request(
    prompt: list[int] | None = None,
    *,
    max_tokens: int = 8,
    deadline_s: float = 30.0,
    ttft_s: float = 0.0,
    **params: object,
) -> GenerationRequest:
    return GenerationRequest(
        f"request-{next(NAMES)}",
        prompt or list(range(1, 13)),
        SamplingParams(max_tokens=max_tokens, **params),  # type: ignore[arg-type]
        deadline_s=deadline_s,
        ttft_s=ttft_s,
    )


async def collect(dispatcher: Dispatcher, request: GenerationRequest) -> tuple[list[int], TokenEvent]:
    """All tokens of a request and its last event."""
    tokens: list[int] = []
    async for event in dispatcher.generate(request):
        tokens.extend(event.token_ids)
    return tokens, event


async def streaming(dispatcher: Dispatcher, prompt: list[int], **options: Any) -> asyncio.Task[Any]:
    """A request whose first token has come, and the task that collects the rest."""
    stream = dispatcher.generate(make_request(prompt, **options))
    tokens = list((await anext(stream)).token_ids)

    async def rest() -> Any:
        async for event in stream:
            tokens.extend(event.token_ids)
        return tokens, event

    return asyncio.create_task(rest())


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    cluster = Cluster()
    yield cluster
    await cluster.close()


class Tools:
    """What tests use beside the cluster; a class, because test modules cannot import this one by name."""

    until = staticmethod(until)
    request = staticmethod(make_request)
    collect = staticmethod(collect)
    streaming = staticmethod(streaming)
    expected = staticmethod(expected)
    cluster = Cluster
    SILENT_S = SILENT_S


@pytest.fixture
def tools() -> type[Tools]:
    return Tools
