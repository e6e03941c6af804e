"""A worker's change of role, with engines that compute nothing: what is drained, what goes on, and what fails."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from common.config import DecodeWorkerConfig, PrefillWorkerConfig
from common.engine.kv.block_pool import BlockCounts
from common.engine.worker import duties
from common.engine.worker.contract import DutyOffer, EngineStatus, ModelFacts
from common.engine.worker.duties import Duties
from common.engine.worker.duty import LoopDuty
from common.engine.worker.loop import EngineLoop
from common.engine.worker.loop_model import LoopModel
from common.engine.worker.metrics import WorkerMetrics
from common.engine.worker.serving import WorkerServing
from common.engine.worker.step_times import StepTimes
from common.engine.worker.vitals import WorkerIdentity
from common.errors import InUseError, ModelError, RankLost
from common.model_files.resolve import resolve_model
from common.wire.messages import ChangeRole, SetServing
from decode_worker.duty import decode_offer
from prefill_worker.duty import prefill_offer

from ....waiting import until

WAIT_S = 60.0
FACTS = ModelFacts(
    model_id="m", fingerprint="f", weights="w", max_model_len=100, block_size=16, num_blocks=8, block_bytes=1,
    precision="float32", kv_dtype="float32",
)  # fmt: skip


class IdleEngine(EngineLoop):
    """Has `requests` until the test takes them."""

    def __init__(self) -> None:
        super().__init__(lambda messages: None)
        self.requests: list[str] = []

    has_work = property(lambda self: False)  # type: ignore[assignment]
    is_empty = property(lambda self: not self.requests)  # type: ignore[assignment]

    def apply(self, command: object) -> None: ...
    def step(self, now: float) -> None: ...
    def expire(self, now: float) -> None: ...
    def report_progress(self, *, has_stepped: bool) -> None: ...
    def device_failure(self) -> str:
        return ""

    def fail_step(self, error: Exception) -> None: ...
    def close(self) -> None: ...

    def snapshot(self) -> EngineStatus:
        return EngineStatus(num_running=len(self.requests))

    def check_integrity(self) -> BlockCounts:
        return BlockCounts(1, 0, 0)


class Control:
    """Notes what routers hear: (role, epoch, whether the worker drains)."""

    def __init__(self) -> None:
        self.duties: Duties
        self.hellos: list[tuple[str, int]] = []
        self.draining: list[bool] = []

    def send_threadsafe(self, messages: object) -> None: ...

    def broadcast_hello(self) -> None:
        assert self.duties.engine is not None and not self.duties.is_draining
        self.hellos.append((self.duties.role, self.duties.identity.epoch))

    def broadcast_heartbeat(self) -> None:
        self.draining.append(self.duties.is_draining)


class Grammars:
    num_users = 1

    def shared(self) -> Grammars:
        self.num_users += 1
        return self

    def close(self) -> None:
        self.num_users -= 1


class OneRank:
    """Another rank of the worker, as its process sees it."""

    def __init__(self) -> None:
        self.failure, self.is_closed = "", False

    def close(self) -> None:
        self.is_closed = True


class Rig:
    """A decode worker. `fails`: whether the duty of a role cannot be begun, and with what."""

    def __init__(self, *, pinned: bool = False, generates: bool = True, rank: OneRank | None = None) -> None:
        self.generates, self.rank = generates, rank
        self.fails: dict[str, Exception] = {}
        self.bound: list[str] = []
        self.grammars, self.control = Grammars(), Control()
        alone = {"enable_prefix_caching": False}
        configs: dict[str, Any] = {"decode": DecodeWorkerConfig(**alone), "prefill": PrefillWorkerConfig(**alone)}
        offers = [self.offer(role, config) for role, config in configs.items()]
        identity = WorkerIdentity.create("decode", "w")
        self.metrics = WorkerMetrics("m", "w", EngineStatus, role="decode")
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self.duties = Duties(offers[0], None if pinned else offers[1], context, None, self.metrics, identity)
        self.control.duties = self.duties
        self.duties.bind()
        self.duties.adopt(self.model)
        self.duties.start(self.control)  # type: ignore[arg-type]

    @cached_property
    def model(self) -> LoopModel:
        files: Any = None
        loaded: Any = SimpleNamespace(others=self.rank)
        grammars: Any = self.grammars
        return LoopModel(files, loaded, grammars, replace(FACTS, changes_role=self.generates), StepTimes())

    def offer(self, role: Any, config: Any) -> DutyOffer[LoopModel]:
        rig = self

        class FakeDuty(LoopDuty):
            def bind_kv(self) -> str:
                rig.bound.append(role)
                return f"tcp://{role}"

            def close_kv(self) -> None:
                rig.bound.remove(role)

            def new_engine(self, *arguments: Any) -> EngineLoop:
                if role in rig.fails:
                    raise rig.fails[role]
                return IdleEngine()

        FakeDuty.role = role
        return DutyOffer(role, config, lambda files: rig.model, lambda parts: FakeDuty(config, parts))

    @property
    def engine(self) -> IdleEngine:
        assert isinstance(self.duties.engine, IdleEngine)
        return self.duties.engine

    def order(self, role: Any) -> None:
        self.duties.order(ChangeRole(role=role, reason="for a test"), self.control)  # type: ignore[arg-type]

    async def until(self, condition: Callable[[], object]) -> None:
        end = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < end
            self.duties.check()
            await asyncio.sleep(0.002)

    async def ends(self) -> None:
        await self.until(lambda: self.duties._change is None)


@pytest.fixture
async def make(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., Rig]]:
    monkeypatch.setattr(duties, "BIND_S", 0.0)
    rigs: list[Rig] = []

    def made(**options: Any) -> Rig:
        rigs.append(Rig(**options))
        return rigs[-1]

    yield made
    for rig in rigs:
        await rig.duties.settle()
        rig.duties.stop()


@asynccontextmanager
async def real_duties(role: str) -> AsyncIterator[Any]:
    """A role with the tiny model."""
    settings: dict[str, Any] = {"model": "tiny-random", "kv_memory_gib": 0.01, "threads": 1, "kernel_check": False}
    decodes = role == "decode"
    offer = decode_offer(DecodeWorkerConfig(**settings)) if decodes else prefill_offer(PrefillWorkerConfig(**settings))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    metrics = WorkerMetrics("m", "w", EngineStatus, role=role)
    duties = Duties(offer, None, context, None, metrics, WorkerIdentity.create(role, "w"))
    duties.bind()
    duties.adopt(offer.load(resolve_model("tiny-random")))
    control: Any = Control()
    control.duties = duties
    duties.start(control)
    try:
        yield duties
    finally:
        duties.stop()
        context.term()


async def test_a_change_waits_for_requests_and_ends_with_a_hello_of_a_new_epoch(make: Callable[..., Rig]) -> None:
    rig = make()
    before, epoch = rig.engine, rig.duties.identity.epoch
    rig.duties.block_log.stored(b"12345678")
    rig.duties.block_log.take()
    before.requests.append("a")
    rig.order("prefill")
    await rig.until(lambda: rig.control.draining)
    assert rig.duties.role == "decode" and rig.control.hellos == []
    before.requests.clear()
    await rig.ends()
    assert rig.duties.role == rig.duties.identity.role == "prefill" and rig.duties.identity.home == "decode"
    assert [role for role, _ in rig.control.hellos] == ["prefill"] and rig.control.hellos[0][1] > epoch
    assert not before.alive and rig.engine.alive
    assert rig.engine.step_times is before.step_times
    blocks = rig.duties.block_log
    assert (blocks.epoch, blocks.sequence) == (rig.duties.identity.epoch, 0) and not blocks.snapshot()[0].hashes


async def test_metrics_are_those_of_the_present_role(make: Callable[..., Rig]) -> None:
    rig = make()
    registry = rig.metrics.registry
    labels = {"model_name": "m", "engine": "w"}
    rig.metrics.set_knob("batch_cap", 8, "full", is_new_reason=True)
    assert registry.get_sample_value("diptych_knob", labels | {"knob": "batch_cap"}) == 8
    assert registry.get_sample_value("diptych_decode_pressure", labels) is not None
    rig.order("prefill")
    await rig.ends()
    assert registry.get_sample_value("diptych_knob", labels | {"knob": "batch_cap"}) is None
    assert registry.get_sample_value("diptych_decode_pressure", labels) is None
    assert registry.get_sample_value("diptych_prefill_backlog_seconds", labels) is not None


async def test_each_role_keeps_what_it_knows_of_its_steps(make: Callable[..., Rig]) -> None:
    rig = make()
    decode = rig.engine.step_fit
    rig.order("prefill")
    await rig.ends()
    assert rig.engine.step_fit is not decode
    rig.order("decode")
    await rig.ends()
    assert rig.engine.step_fit is decode


async def test_a_second_order_meanwhile_is_ignored(make: Callable[..., Rig], caplog: pytest.LogCaptureFixture) -> None:
    rig = make()
    for _ in range(3):
        rig.order("prefill")
    await rig.ends()
    rig.order("prefill")
    assert caplog.text.count("a role change is already in progress") == 2 and "this is already its role" in caplog.text
    assert len(rig.control.hellos) == 1


async def test_no_change_begins_while_an_order_to_serve_is_executed(
    make: Callable[..., Rig], caplog: pytest.LogCaptureFixture
) -> None:
    rig = make()
    rig.duties.has_order = True
    rig.order("prefill")
    assert not rig.duties.is_changing and not rig.duties.is_draining
    assert "the worker is starting, draining or executing an order to serve" in caplog.text
    rig.duties.has_order = False
    rig.order("prefill")
    await rig.ends()
    assert rig.duties.role == "prefill"


async def test_a_pinned_worker_refuses(make: Callable[..., Rig], caplog: pytest.LogCaptureFixture) -> None:
    rig = make(pinned=True)
    rig.order("prefill")
    assert "the role is fixed" in caplog.text and not rig.duties.may_change and rig.control.draining == []


async def test_a_worker_whose_requests_stay_stays_too(
    make: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(duties, "ROLE_DRAIN_S", 0.05)
    rig = make()
    engine = rig.engine
    engine.requests.append("a")
    await rig.until(lambda: engine.status.num_running)
    rig.order("prefill")
    await rig.ends()
    assert rig.engine is engine and engine.alive and rig.duties.role == "decode"
    assert rig.control.draining == [True, False] and rig.control.hellos == []
    assert "role change cancelled, still decode: 1 requests remain" in caplog.text


async def test_a_worker_that_cannot_become_another_goes_back(
    make: Callable[..., Rig], caplog: pytest.LogCaptureFixture
) -> None:
    rig = make()
    rig.fails["prefill"] = OSError("no room")
    epoch = rig.duties.identity.epoch
    rig.order("prefill")
    await rig.ends()
    assert rig.duties.role == "decode" and rig.engine.alive and rig.duties.identity.epoch > epoch
    assert [role for role, _ in rig.control.hellos] == ["decode"]
    assert "role change to prefill failed: returning to decode" in caplog.text and "prefill" not in rig.bound


async def test_a_worker_that_cannot_become_anything_ends(make: Callable[..., Rig]) -> None:
    rig = make()
    rig.fails = {"prefill": OSError("no room"), "decode": OSError("none here either")}
    rig.order("prefill")
    with pytest.raises(OSError, match="none here either"):
        await rig.ends()


async def test_the_end_of_the_process_gives_up_a_drain(make: Callable[..., Rig]) -> None:
    rig = make()
    rig.engine.requests.append("a")
    rig.order("prefill")
    await rig.until(lambda: rig.duties.is_draining)
    await rig.duties.settle()
    assert rig.duties.role == "decode" and rig.engine.alive


@pytest.mark.parametrize("role", ["decode", "prefill"])
async def test_a_sleep_leaves_nothing_of_the_model(role: str) -> None:
    async with real_duties(role) as duties:
        assert duties.model is not None
        loaded = duties.model.loaded
        parts = [weakref.ref(part) for part in (loaded.runner, loaded.runner.model, loaded.kv)]
        del loaded
        await duties.unload()
        assert [part() for part in parts] == [None] * 3
        assert (duties.role, duties.kv_address, duties.lend_address) == (role, "", "")


@pytest.mark.parametrize("role", ["decode", "prefill"])
async def test_updates_leave_nothing_of_weights_that_are_not_served(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    models: list[weakref.ref[Any]] = []
    take_up = Duties._take_up

    async def noted(duties: Duties, *arguments: Any) -> None:
        assert isinstance(duties.model, LoopModel)
        models.append(weakref.ref(duties.model.loaded.runner.model))
        if len(models) == 3:
            raise ModelError("no room")
        await take_up(duties, *arguments)

    async with real_duties(role) as duties:
        monkeypatch.setattr(Duties, "_take_up", noted)
        models.append(weakref.ref(duties.model.loaded.runner.model))
        control: Any = SimpleNamespace(
            broadcast_hello=lambda: None, send_threadsafe=lambda messages: None, broadcast_heartbeat=lambda: None
        )
        resolve: Any = resolve_model
        serving = WorkerServing(duties, duties._home.load, lambda: None, resolve, lambda kept: None)
        for number, status in enumerate(("done", "failed"), 1):
            serving.order(SetServing(version=number, weights="tiny-random", weights_number=number), control)
            await until(lambda: serving.state is not None and serving.state.status != "busy")
            assert serving.state is not None and serving.state.status == status
        served = [ref() for ref in models]
        assert served == [None, duties.model.loaded.runner.model, None, duties.model.loaded.runner.model]
        await serving.close()


async def test_a_model_that_cannot_be_served_after_a_sleep_is_freed(make: Callable[..., Rig]) -> None:
    rig = make(rank=(rank := OneRank()))
    await rig.duties.unload()
    rank.is_closed, rig.fails = False, {"decode": OSError("no room")}
    with pytest.raises(OSError, match="no room"):
        await rig.duties.reload(lambda: rig.model, rig.control)  # type: ignore[arg-type]
    assert rank.is_closed and rig.duties.model is None


async def test_what_a_failed_load_after_a_sleep_has_taken_is_freed(make: Callable[..., Rig]) -> None:
    rig, freed = make(), list[str]()
    rig.duties._home = replace(rig.duties._home, free=lambda: freed.append("memory"))
    await rig.duties.unload()

    def load() -> Any:
        raise ModelError("no room")

    with pytest.raises(ModelError, match="no room"):
        await rig.duties.reload(load, rig.control)  # type: ignore[arg-type]
    assert freed == ["memory"] * 2


async def test_a_port_that_is_released_late_is_bound_in_the_end() -> None:
    tries = iter((zmq.ZMQError(98), zmq.ZMQError(98), None))

    def bind() -> None:
        if (error := next(tries)) is not None:
            raise error

    await duties._retried(bind, zmq.ZMQError, 60.0)
    assert next(tries, "all") == "all"
    tries = iter((zmq.ZMQError(98),) * 9)
    with pytest.raises(zmq.ZMQError):
        await duties._retried(bind, zmq.ZMQError, 0.0)


async def test_a_file_that_a_slow_disk_releases_late_is_opened_in_the_end(make: Callable[..., Rig]) -> None:
    rig = make()
    rig.fails["prefill"] = InUseError("kv_disk_path", "kv", "free")
    rig.order("prefill")
    await rig.until(lambda: "prefill" in rig.bound)
    rig.fails.clear()
    await rig.ends()
    assert rig.duties.role == "prefill"


async def test_a_worker_whose_model_generates_no_text_refuses(
    make: Callable[..., Rig], caplog: pytest.LogCaptureFixture
) -> None:
    rig = make(generates=False)
    rig.order("prefill")
    assert (
        "the model does not generate text" in caplog.text and not rig.duties.may_change and rig.control.draining == []
    )


async def test_a_lost_rank_is_the_end_of_all_duties(make: Callable[..., Rig]) -> None:
    rig = make(rank=(rank := OneRank()))
    rig.duties.check()
    rank.failure = "rank 1 is gone"
    with pytest.raises(RankLost, match="rank 1 is gone"):
        rig.duties.check()
    assert rig.duties.stop() and rank.is_closed


async def test_a_host_that_wants_to_end_has_its_worker_drain(
    make: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make()
    assert not rig.duties.must_drain
    monkeypatch.setattr(type(rig.duties.model), "is_leaving", True)
    assert rig.duties.must_drain
