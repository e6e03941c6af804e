"""Workers that follow a script, on real ZeroMQ sockets: everything but the model is as in life."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable

import pytest
import zmq
import zmq.asyncio

from common.config import RouterConfig
from common.wire.codec import decode, encode
from common.wire.message_fields import unpack_tokens
from common.wire.messages import (
    AbortRequest,
    AnyMessage,
    DecodeRequest,
    HandOver,
    Message,
    PrefillRequest,
    PromptLogprobs,
    RequestFailed,
    RouterHello,
    Timeline,
    TokenDelta,
    TokenOutput,
    WorkerHeartbeat,
    WorkerHello,
)
from common.wire.sampling_params import SamplingParams, TokenLogprobs
from router.dispatch.client import GenerationRequest, TokenEvent
from router.dispatch.dispatcher import Dispatcher

PATIENT_S = 1.0
"""Silence that is no worker's fault, on a machine that has other things to do, is shorter. Deaths are told at once."""
SILENT_S = 0.3
"""For tests about silence, which then need not wait for long."""
EPOCHS = itertools.count(1000)
NAMES = itertools.count(1)


def next_token(tokens: list[int]) -> int:
    """The scripted model: a token that depends on those before it and on how many they are, so that a lost or repeated
    one shows in all that follow."""
    return (sum((i + 1) * t for i, t in enumerate(tokens[-40:])) * 31 + len(tokens)) % 997


def expected(prompt: list[int], count: int) -> list[int]:
    """What an unfailed run answers."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class FakeWorker:
    """One worker: a ROUTER socket, signs of life, and a script that may be changed while it runs."""

    def __init__(self, role: str, cluster: Cluster, **hello: object) -> None:
        self.role, self.cluster = role, cluster
        self.worker_id = f"{role}-{next(NAMES)}"
        self.hello: dict[str, object] = {
            "fingerprint": "f", "model": "m", "block_size": 4, "num_blocks": 1000, "max_model_len": 4096,
            "max_num_seqs": 64, "kv_address": "tcp://127.0.0.1:1" if role == "decode" else "",
        } | hello  # fmt: skip
        self.beat: dict[str, object] = {}
        self.received: list[AnyMessage] = []
        self.routers: dict[bytes, int] = {}  # with the serial of the last request from each
        self.epoch = next(EPOCHS)
        self.step = 0
        self.beating = self.serving = True
        self.token_s = 0.0
        self.stop_at: int | None = None
        self.logprobs_per_message = 5
        self.on_request: Callable[[bytes, Message], bool] = lambda router, message: False
        self.on_handover: Callable[[bytes, HandOver], bool] = lambda router, order: False
        self.kv: dict[tuple[str, int], asyncio.Future[list[int]]] = {}
        self.sequences: dict[str, tuple[DecodeRequest, list[int]]] = {}
        self.jobs: dict[str, asyncio.Task[None]] = {}
        self.attempts: dict[str, int] = {}
        self.handovers: list[asyncio.Task[None]] = []
        self.address = ""
        self.open()

    def open(self) -> None:
        self.socket = self.cluster.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self.socket.bind(self.address or "tcp://127.0.0.1:*")
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.tasks = [asyncio.create_task(self.receive()), asyncio.create_task(self.live())]

    def die(self) -> None:
        """As by SIGKILL: everything is gone, nothing is said."""
        for task in [*self.tasks, *self.jobs.values(), *self.handovers]:
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
                continue
            self.received.append(message)
            if isinstance(message, AbortRequest):
                self.abort(message)
            is_work = isinstance(message, PrefillRequest | DecodeRequest) and self.serving
            if is_work and not self.on_request(router, message):
                self.start(router, message)
            if isinstance(message, HandOver) and not self.on_handover(router, message):
                self.handovers = [*self.handovers, asyncio.create_task(self.hand_over(router, message))]

    def abort(self, message: AbortRequest) -> None:
        if message.attempt >= self.attempts.get(message.request_id, 0):  # else it is about an earlier attempt
            job = self.jobs.pop(message.request_id, None)
            if job is not None:
                job.cancel()

    def start(self, router: bytes, message: PrefillRequest | DecodeRequest) -> None:
        self.routers[router] = max(self.routers.get(router, 0), message.serial)
        work = self.prefill(router, message) if isinstance(message, PrefillRequest) else self.generate(router, message)
        if old := self.jobs.get(message.request_id):
            old.cancel()
        self.jobs[message.request_id], self.attempts[message.request_id] = asyncio.create_task(work), message.attempt

    async def live(self) -> None:
        while True:
            if self.beating:
                self.step += 1
                for router in self.routers:
                    self.send(router, self.heartbeat(router))
            await asyncio.sleep(0.02)

    async def prefill(self, router: bytes, message: PrefillRequest) -> None:
        await asyncio.sleep(self.token_s)
        tokens = unpack_tokens(message.prompt)
        self.send_logprobs(router, message, tokens)
        token = next_token(tokens)
        reason = self.reason(message.params, message.num_output_tokens + 1)
        self.output(router, message, message.num_output_tokens, [token], reason)
        if message.decode is not None and not reason:  # an answer that has ended needs no KV
            self.cluster.ship(message, token)

    async def generate(self, router: bytes, message: DecodeRequest) -> None:
        tokens = unpack_tokens(message.prompt)
        self.sequences[message.request_id] = (message, tokens)
        index = message.num_output_tokens
        if message.prefill_worker:
            received = await self.expect(message.request_id, message.attempt)
            if message.num_reserved_tokens:
                tokens += received
                self.output(router, message, index, received)
                index += len(received)
        self.send_logprobs(router, message, tokens)
        reason = ""
        while not reason:
            tokens.append(next_token(tokens))
            reason = self.reason(message.params, index + 1)
            self.output(router, message, index, [tokens[-1]], reason)
            index += 1
            await asyncio.sleep(self.token_s)

    async def hand_over(self, router: bytes, order: HandOver) -> None:
        """The sequence goes on at the target once a token is there that its request does not have."""
        message, tokens = self.sequences[order.request_id]
        num_known = len(message.prompt) // 4 - message.num_output_tokens + order.num_output_tokens
        while len(tokens) <= num_known:  # noqa: ASYNC110 - it is a list that grows
            await asyncio.sleep(0.002)
        if (job := self.jobs.pop(order.request_id, None)) is None or job.done():
            return
        job.cancel()
        self.cluster.receive(order, tokens[num_known:])
        self.output(router, message, len(tokens) - len(message.prompt) // 4 + message.num_output_tokens, [], "moved")

    def refuse_handover(self, router: bytes, order: HandOver) -> bool:
        failed = RequestFailed(
            worker_id=self.worker_id, request_id=order.request_id, attempt=order.new_attempt, phase="handover",
            message="scripted", retryable=True,
        )  # fmt: skip
        self.send(router, failed)
        return True

    def expect(self, request_id: str, attempt: int) -> asyncio.Future[list[int]]:
        return self.kv.setdefault((request_id, attempt), asyncio.get_running_loop().create_future())

    def reason(self, params: SamplingParams, count: int) -> str:
        if count == self.stop_at:
            return "stop"
        return "length" if count >= params.max_tokens else ""

    def output(
        self, router: bytes, message: PrefillRequest | DecodeRequest, index: int, tokens: list[int], reason: str = ""
    ) -> None:
        delta = TokenDelta(
            message.request_id, message.attempt, index, tuple(tokens), reason,
            timeline=Timeline(prefill_s=0.5) if self.role == "prefill" else Timeline(decode_s=0.25),
        )  # fmt: skip
        self.send(router, TokenOutput(worker_id=self.worker_id, epoch=self.epoch, outputs=(delta,)))

    def send_logprobs(self, router: bytes, message: PrefillRequest | DecodeRequest, tokens: list[int]) -> None:
        """Log-probabilities of the prompt, `logprobs_per_message` at a time, if wanted."""
        if message.params.prompt_logprobs < 0 or message.num_output_tokens:
            return
        scores = [TokenLogprobs(-float(token)) for token in tokens[1:]]
        for first in range(0, len(scores), self.logprobs_per_message):
            part = tuple(scores[first : first + self.logprobs_per_message])
            told = PromptLogprobs(
                worker_id=self.worker_id, epoch=self.epoch, request_id=message.request_id, attempt=message.attempt,
                start=first + 1, logprobs=part,
            )  # fmt: skip
            self.send(router, told)

    def fail(
        self, router: bytes, message: Message, *, retryable: bool = True, text: str = "scripted", phase: str = "queue"
    ) -> bool:
        assert isinstance(message, PrefillRequest | DecodeRequest)
        failed = RequestFailed(
            worker_id=self.worker_id, request_id=message.request_id, attempt=message.attempt, phase=phase,
            message=text, retryable=retryable,
        )  # fmt: skip
        self.send(router, failed)
        return True

    def hello_message(self) -> WorkerHello:
        return WorkerHello(worker_id=self.worker_id, role=self.role, epoch=self.epoch, **self.hello)  # type: ignore[arg-type]

    def heartbeat(self, router: bytes) -> WorkerHeartbeat:
        busy = len([job for job in self.jobs.values() if not job.done()])
        values = {
            "step": self.step, "ready": True, "draining": False, "num_running": busy, "num_waiting": 0,
            "num_transferring": 0, "num_waiting_tokens": 0, "num_free_blocks": 1000, "num_cached_blocks": 0,
            "num_owned_blocks": 0, "serial": self.routers[router],
        }  # fmt: skip
        return WorkerHeartbeat(worker_id=self.worker_id, epoch=self.epoch, **(values | self.beat))  # type: ignore[arg-type]

    def send(self, router: bytes, message: Message) -> None:
        self.socket.send_multipart([router, encode(message)])

    def of(self, kind: type[Message]) -> list[AnyMessage]:
        return [message for message in self.received if isinstance(message, kind)]


class Cluster:
    """The workers of one test and the dispatcher in front of them."""

    def __init__(self) -> None:
        self.context = zmq.asyncio.Context()
        self.workers: list[FakeWorker] = []
        self.dispatcher: Dispatcher | None = None

    def add(self, role: str, **hello: object) -> FakeWorker:
        self.workers.append(FakeWorker(role, self, **hello))
        return self.workers[-1]

    def ship(self, message: PrefillRequest, token: int) -> None:
        assert message.decode is not None
        for worker in self.workers:
            if worker.worker_id == message.decode.worker_id and worker.epoch == message.decode.epoch:
                received = worker.expect(message.request_id, message.attempt)
                if not received.done():
                    received.set_result([token])

    def receive(self, order: HandOver, tokens: list[int]) -> None:
        for worker in self.workers:
            if worker.worker_id == order.target.worker_id and worker.epoch == order.target.epoch:
                worker.expect(order.request_id, order.new_attempt).set_result(tokens)

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
    def prefill(self) -> list[FakeWorker]:
        return [worker for worker in self.workers if worker.role == "prefill"]

    @property
    def decode(self) -> list[FakeWorker]:
        return [worker for worker in self.workers if worker.role == "decode"]

    async def close(self) -> None:
        if self.dispatcher is not None:
            await self.dispatcher.close()
        for worker in self.workers:
            worker.die()
        self.context.term()


async def until(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Wait for a condition; fail the test when it never comes true."""
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            pytest.fail("the condition did not come true")
        await asyncio.sleep(0.005)


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
    expected = staticmethod(expected)
    cluster = Cluster
    SILENT_S = SILENT_S


@pytest.fixture
def tools() -> type[Tools]:
    return Tools
