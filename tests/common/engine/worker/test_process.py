"""A worker process serves an engine of another make: what routers hear of it, and how it ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
import zmq.asyncio

from common.config import DecodeWorkerConfig
from common.engine.worker import process
from common.engine.worker.contract import RequestReceived
from common.engine.worker.process import WorkerProcess
from common.errors import ConfigError, ModelError, RankLost
from common.model_files import resolve_model
from common.wire import decode, encode
from common.wire.message_fields import pack_tokens
from common.wire.messages import (
    PROTOCOL_VERSION,
    AbortRequest,
    AnyMessage,
    DecodeRequest,
    Message,
    RequestFailed,
    ResetPrefixCache,
    RouterHello,
    SetAdapter,
    SetServing,
    TokenOutput,
    WorkerHeartbeat,
    WorkerHello,
)
from common.wire.sampling_params import SamplingParams

from ....foreign_engine import FACTS, KV_ADDRESS, Faults, ForeignEngine, ForeignModel, foreign_offer, next_token
from ....waiting import until

WAIT_S = 60.0


class Router:
    """A router's connection. `got` are the messages of the worker."""

    def __init__(self, context: zmq.asyncio.Context, address: str) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.set(zmq.LINGER, 0)
        self.socket.connect(address)
        self.got: list[AnyMessage] = []
        self.reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        while True:
            self.got.append(decode(await self.socket.recv()))

    async def tell(self, message: Message) -> None:
        await self.socket.send(encode(message))

    def last(self, kind: type[Any]) -> Any:
        return next((message for message in reversed(self.got) if isinstance(message, kind)), None)

    def tokens(self, name: str) -> list[int]:
        outputs = (message for message in self.got if isinstance(message, TokenOutput))
        deltas = (delta for each in outputs for delta in each.outputs if delta.request_id == name)
        return [token for delta in deltas for token in delta.token_ids]

    async def close(self) -> None:
        self.reading.cancel()
        await asyncio.gather(self.reading, return_exceptions=True)
        self.socket.close()


@pytest.fixture
async def connect() -> AsyncIterator[Callable[[str], Router]]:
    context = zmq.asyncio.Context()
    routers: list[Router] = []

    def connected(address: str) -> Router:
        routers.append(Router(context, address))
        return routers[-1]

    yield connected
    for router in routers:
        await router.close()
    context.term()


def request(name: str, tokens: list[int], num_tokens: int, serial: int) -> DecodeRequest:
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    return DecodeRequest(request_id=name, attempt=0, prompt=pack_tokens(tokens), params=params, serial=serial)


@pytest.mark.e2e
async def test_a_foreign_engine_from_loading_to_drain(connect: Callable[[str], Router], tmp_path: Path) -> None:
    """And the process never loads torch, which exit status 9 would say."""
    addresses, ready = tmp_path / "addresses.json", tmp_path / "ready"
    flags = ("--model", "tiny-random", "--host", "127.0.0.1", "--advertise-host", "localhost", "--worker-id", "f")
    worker = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.foreign_engine", *flags, "--max-loras", "2", "--address-file", str(addresses)),
        env=os.environ | {"FOREIGN_READY": str(ready)},
    )
    try:
        await until(addresses.exists, patience_s=WAIT_S)
        router = connect(json.loads(addresses.read_text())["address"])
        await router.tell(RouterHello(router_id="r", epoch=1, protocol=PROTOCOL_VERSION))
        await until(lambda: router.last(WorkerHeartbeat))
        hello, beat = router.last(WorkerHello), router.last(WorkerHeartbeat)
        assert (hello.fingerprint, hello.kv_address, hello.num_blocks, beat.ready) == ("loading", "", 0, False)

        ready.touch()
        await until(lambda: router.last(WorkerHello).fingerprint != "loading")
        hello = router.last(WorkerHello)
        assert (hello.model, hello.fingerprint, hello.weights) == ("tiny-random", FACTS.fingerprint, FACTS.weights)
        assert (hello.block_size, hello.num_blocks, hello.max_model_len) == (32, 512, 2048)
        assert (hello.max_num_seqs, hello.max_step_tokens, hello.changes_role) == (16, 100, False)
        assert (hello.kv_address, hello.layout) == (KV_ADDRESS, FACTS.layout), "the ranks' own, not the advertised host"
        await until(lambda: router.last(WorkerHeartbeat).ready)

        tokens = list(range(70))
        await router.tell(request("a", tokens, 5, 1))
        await until(lambda: len(router.tokens("a")) == 5)
        for token in router.tokens("a"):
            assert token == next_token(tokens)
            tokens.append(token)
        await until(lambda: router.last(WorkerHeartbeat).serial == 1)

        await router.tell(SetAdapter(name="x", version=1, path="/adapters/x"))
        await router.tell(SetAdapter(name="y", version=2, path="/elsewhere"))
        await until(lambda: [each.status for each in router.last(WorkerHeartbeat).adapters] == ["loaded", "failed"])

        await router.tell(request("b", tokens, 1000, 2))
        await until(lambda: router.tokens("b"))
        worker.send_signal(signal.SIGTERM)
        await until(lambda: router.last(WorkerHeartbeat).draining)
        await router.tell(request("c", tokens, 5, 3))
        await until(lambda: router.last(RequestFailed))
        refused = router.last(RequestFailed)
        assert (refused.request_id, refused.retryable, refused.message) == ("c", True, "the worker is draining")
        await router.tell(AbortRequest(request_id="b", attempt=0))
        async with asyncio.timeout(WAIT_S):
            assert await worker.wait() == 0
    finally:
        if worker.returncode is None:
            worker.kill()
            await worker.wait()


def process_of(model: ForeignModel, **settings: Any) -> WorkerProcess:
    config = DecodeWorkerConfig(model="tiny-random", host="127.0.0.1", **settings)
    return WorkerProcess(foreign_offer(config, model))


async def test_a_request_without_an_engine_is_refused() -> None:
    worker, sent = process_of(ForeignModel()), list[Message]()
    control: Any = SimpleNamespace(send=lambda router, message: sent.append(message))
    worker.control = control
    worker._on_message(b"router", request("a", [1, 2, 3], 5, 1))
    (refused,) = sent
    assert isinstance(refused, RequestFailed) and refused.retryable
    assert (refused.request_id, refused.phase, refused.message) == ("a", "queue", "the worker is starting")
    worker.context.destroy(linger=0)


async def test_a_reset_without_an_engine_is_applied_by_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of blocks outlive engines."""
    applied: list[object] = []
    monkeypatch.setattr(ForeignEngine, "submit", lambda engine, command: applied.append(command) or True)
    process, reset = process_of(ForeignModel()), ResetPrefixCache(request_id="reset")
    process._on_message(b"router", reset)
    running = asyncio.create_task(process.run())
    await until(lambda: process.duties.engine is not None or running.done())
    assert applied == [RequestReceived(b"router", reset)] and process.duties.pending_reset is None
    os.kill(os.getpid(), signal.SIGTERM)
    async with asyncio.timeout(WAIT_S):
        await running


async def test_a_dead_engine_ends_the_process_and_its_model() -> None:
    model = ForeignModel(Faults(pace_s=0.01))
    process = process_of(model)
    running = asyncio.create_task(process.run())
    await until(lambda: process.duties.engine is not None or running.done())
    model.faults.error = RankLost("rank 1 is gone")
    process._on_message(b"router", request("a", [1, 2, 3], 5, 1))
    with pytest.raises(RuntimeError, match="the engine died") as died:
        async with asyncio.timeout(WAIT_S):
            await running
    assert isinstance(died.value.__cause__, RankLost) and model.is_closed


async def test_a_stuck_engine_is_not_drained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its supervisor would kill the process meanwhile, and leave the processes of the engine behind."""
    model = ForeignModel(Faults(pace_s=3600.0))
    process = process_of(model, drain_timeout_s=3600.0)
    running = asyncio.create_task(process.run())
    await until(lambda: process.duties.engine is not None or running.done())
    process._on_message(b"router", request("a", [1, 2, 3], 5, 1))
    await until(lambda: process.duties.engine is not None and not process.duties.engine.is_empty)
    monkeypatch.setattr(ForeignEngine, "is_stuck", lambda *_: True)
    os.kill(os.getpid(), signal.SIGTERM)
    async with asyncio.timeout(WAIT_S):
        await running
    assert model.is_closed


@pytest.mark.parametrize("lost", ["rank 1 is gone", ""])
async def test_a_lost_part_of_an_engine_ends_its_process(lost: str) -> None:
    """One that only leaves has the worker drain."""
    model = ForeignModel()
    process = process_of(model)
    running = asyncio.create_task(process.run())
    await until(lambda: process.duties.engine is not None or running.done())
    model.failure, model.is_leaving = lost, not lost
    async with asyncio.timeout(WAIT_S):
        if lost:
            with pytest.raises(RankLost, match=lost):
                await running
        else:
            await running
    assert model.is_closed


@pytest.mark.parametrize("error", [ModelError("no weights"), ConfigError("kv_transport", "nixl", "tcp")])
async def test_an_engine_may_refuse_to_load(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    process = process_of(ForeignModel())

    def refuse(_: object) -> ForeignModel:
        raise error

    monkeypatch.setattr(process, "_load_model", refuse)
    with pytest.raises(type(error)):
        await process.run()


async def test_weights_of_an_order_are_protected_like_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[object] = []
    kept: list[list[Path]] = []
    monkeypatch.setattr("common.engine.worker.process.hold_model", held.append)
    monkeypatch.setattr("common.engine.worker.process.release_models", lambda paths: kept.append([*paths]))
    worker = process_of(ForeignModel())
    control: Any = None
    weights = str(resolve_model("tiny-random").weights[0].parent)
    files = await worker.serving._files(weights, 1, SetServing(version=1), control)
    assert held == [files.weights]
    worker._release((weights, ""))
    worker._release(("/other",))
    assert kept == [[files.weights[0]], []]
    worker.context.destroy(linger=0)


async def test_what_a_load_has_started_ends_with_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[object] = []
    offer = replace(foreign_offer(DecodeWorkerConfig(model="tiny-random")), abandon=lambda: ended.append("load"))
    monkeypatch.setattr(process, "end_process", ended.append)
    worker, serving = WorkerProcess(offer), asyncio.create_task(asyncio.sleep(WAIT_S))
    worker._abandon_loading(serving)
    assert ended == ["load", 0]
    serving.cancel()
    worker.context.destroy(linger=0)


async def test_a_worker_that_loads_its_model_after_a_sleep_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its supervisor would kill it while it waits for the thread that loads."""
    worker = process_of(ForeignModel())
    abandoned: list[object] = []
    monkeypatch.setattr(worker, "_abandon_loading", abandoned.append)
    running = asyncio.create_task(worker.run())
    await until(lambda: worker.duties.engine is not None or running.done())
    worker.serving.is_waking = True
    os.kill(os.getpid(), signal.SIGTERM)
    async with asyncio.timeout(WAIT_S):
        await running
    assert len(abandoned) == 1


async def test_an_adapter_of_a_flag_that_cannot_be_loaded_closes_the_model() -> None:
    model = ForeignModel()
    process = process_of(model, max_loras=2, lora=("x=/elsewhere",))
    with pytest.raises(ModelError, match="--lora x: no adapter in /elsewhere"):
        await process.run()
    assert model.is_closed
