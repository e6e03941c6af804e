"""The plan loop reads the router's registry and load window, and gives its plan to metrics and scalers."""

from __future__ import annotations

import asyncio
import logging
import math
from typing import Any
from unittest.mock import call, create_autospec

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from common.config import RouterConfig
from common.latency.step_model import StepModel, StepShape
from common.wire.messages import WorkerHeartbeat, WorkerHello
from router.fleet.registry import WorkerRegistry
from router.observe.collectors import PlanCollector
from router.planner.loop import PlanLoop
from router.planner.offered_load import LoadWindow, SampledRequest
from router.planner.pool import Fleet, PoolObserver, PoolState, StartTimes, StartupCheck
from router.planner.scaler import DeployedPools, Scaler

from ...fake_worker import heartbeat_of, hello_of
from ...waiting import until

MODEL = StepModel(fixed_s=0.004, floor_s=0.008, token_s=4e-5, row_s=3e-5, num_steps=99)
PREFILL, DECODE = "tcp://p:1", "tcp://d:1"


def hello(role: str, epoch: int = 1) -> WorkerHello:
    return hello_of(role, role, epoch=epoch, block_size=16, max_step_tokens=512)


def beat(role: str, model: StepModel = MODEL, **over: Any) -> WorkerHeartbeat:
    return heartbeat_of(role, **({"step_model": model} | over))


def registry(**beats: WorkerHeartbeat) -> WorkerRegistry:
    """One worker of each role; those with a heartbeat are ready."""
    found = WorkerRegistry([PREFILL], [DECODE], worker_timeout_s=1.0)
    for role, each in beats.items():
        address = PREFILL if role == "prefill" else DECODE
        found.on_hello(address, hello(role), 0.0)
        found.on_heartbeat(address, each, 0.0)
    return found


# ---------------------------------------------------------------- the pools as they are seen


def test_ready_starting_silent_and_gone() -> None:
    workers, observer = (
        registry(decode=beat("decode", num_running=3, num_waiting=2)),
        PoolObserver(("prefill", "decode")),
    )
    pools = observer.observe(workers.workers.values(), {"prefill": 2}, 0.0)
    assert (pools["prefill"].num_starting, pools["prefill"].num_unschedulable, pools["prefill"].num_usable) == (3, 2, 1)
    decode = pools["decode"]
    assert (decode.num_ready, decode.num_held, decode.num_waiting, decode.is_full) == (1, 3, 2, True)
    assert (decode.kind.model, decode.kind.num_blocks, decode.kind.step_tokens) == (MODEL, 1000, 512)
    workers.sweep(0.2)
    workers.sweep(2.0)
    assert observer.observe(workers.workers.values(), {}, 2.0)["decode"].num_silent in (0, 1)
    workers.on_cut(DECODE)
    assert observer.observe(workers.workers.values(), {}, 3.0)["decode"].num_silent == 1
    gone = observer.observe(workers.workers.values(), {}, 100.0)["decode"]
    assert gone.num_present == 0 and gone.kind.model == MODEL, "what a worker is like is remembered"


def test_workers_that_leave_are_not_counted_on() -> None:
    workers = registry(prefill=beat("prefill", draining=True), decode=beat("decode"))
    workers.withhold(DECODE, "terminating")
    pools = PoolObserver(("prefill", "decode")).observe(workers.workers.values(), {}, 0.0)
    assert [(pool.num_present, pool.num_draining) for pool in pools.values()] == [(0, 1), (0, 1)]


def test_a_pool_that_never_had_a_worker_is_taken_for_one_like_the_other() -> None:
    observer = PoolObserver(("prefill", "decode"))
    pools = observer.observe(registry(decode=beat("decode")).workers.values(), {}, 0.0)
    assert pools["prefill"].kind == pools["decode"].kind
    no_prompts = beat("decode", StepModel(fixed_s=0.01, num_steps=5))
    pools = PoolObserver(("prefill", "decode")).observe(registry(decode=no_prompts).workers.values(), {}, 0.0)
    assert not pools["prefill"].kind.is_known


def test_other_routers_load_is_seen_in_the_workers_reports() -> None:
    workers, observer = registry(decode=beat("decode")), PoolObserver(("decode",))
    assert observer.num_routers(workers.workers.values()) == 1.0
    for _ in range(4):
        workers.book(DECODE, 0.0, prompt=StepShape(), num_blocks=1)
    workers.on_heartbeat(DECODE, beat("decode", num_running=12, serial=9), 1.0)
    for _ in range(60):
        times = observer.num_routers(workers.workers.values())
    assert times == pytest.approx(3.0, rel=0.01)


def test_a_router_without_requests_cannot_tell_the_load_of_others() -> None:
    workers, observer = registry(decode=beat("decode")), PoolObserver(("decode",))
    workers.on_heartbeat(DECODE, beat("decode", num_running=12), 1.0)
    assert math.isinf(observer.num_routers(workers.workers.values()))


@pytest.mark.parametrize(
    ("is_listed", "states", "replicas", "now", "missing"),
    [
        (False, {"num_ready": 2}, 3, 900.0, "discovery has not listed the workers yet"),
        (False, {"num_ready": 3}, None, 900.0, "discovery has not listed the workers yet"),
        (False, {"num_ready": 3}, 3, 10.0, ""),
        (False, {}, 0, 10.0, ""),  # DNS has no answer for the name of a pool that sleeps
        (True, {"num_ready": 1}, 3, 10.0, "2 workers are not ready yet"),
        (True, {"num_ready": 1, "num_starting": 2, "num_unschedulable": 2}, 3, 10.0, ""),
        (True, {"num_ready": 1, "num_starting": 2}, None, 10.0, "2 workers are not ready yet"),
        (True, {"num_ready": 1}, 3, 60.0, ""),
    ],
)
def test_what_a_router_waits_for_after_its_start(
    is_listed: bool, states: dict[str, int], replicas: int | None, now: float, missing: str
) -> None:
    check, sizes = StartupCheck(), {} if replicas is None else {"decode": replicas}
    fleet = Fleet({"decode": PoolState(**states)}, start_s={"decode": 60.0}, replicas=sizes)  # type: ignore[arg-type]
    check.missing(is_listed, fleet, 0.0)
    assert check.missing(is_listed, fleet, now) == missing
    assert check.is_complete is not bool(missing)
    if not missing:
        assert check.missing(False, fleet, now) == "", "it is not asked again"


def test_starts_are_measured_from_wish_to_readiness() -> None:
    starts = StartTimes()
    starts.observe("decode", 1, 1, 0.0)
    assert starts.seconds() == {}
    starts.observe("decode", 3, 1, 10.0)
    starts.observe("decode", 3, 2, 52.0)
    assert starts.seconds()["decode"] == 42.0
    starts.observe("decode", 3, 3, 70.0)
    assert starts.seconds()["decode"] == 60.0
    starts.observe("decode", 4, 3, 80.0)
    starts.observe("decode", 3, 3, 90.0)  # no longer wanted
    starts.observe("decode", 3, 4, 95.0)
    assert starts.seconds()["decode"] == 60.0


# ---------------------------------------------------------------- the loop


def loop(
    workers: WorkerRegistry, scaler: Scaler | None = None, **settings: Any
) -> tuple[PlanLoop, LoadWindow, list[float]]:
    config = RouterConfig(decode=(DECODE,), prefill=(PREFILL,), planner="advice", **settings)
    window, now = LoadWindow(), [0.0]
    made = PlanLoop(config, window, lambda: workers.workers.values(), dict, scaler, clock=lambda: now[0])
    return made, window, now


def test_a_look_becomes_a_plan_a_log_line_and_gauges(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    workers = registry(prefill=beat("prefill"), decode=beat("decode"))
    planning, window, now = loop(workers, slo_ttft_ms=300.0, slo_tpot_ms=20.0, max_decode=2)
    shown = CollectorRegistry()
    shown.register(PlanCollector(lambda: planning.outlook, {"engine": "router"}))
    assert b"wanted" not in generate_latest(shown)
    for second in range(100):
        window.arrived(float(second), 40)
        window.ended(SampledRequest(800, 0, 200), float(second))
    window.first_token(0.25, 100.0)
    now[0] = 101.0
    workers.on_heartbeat(PREFILL, beat("prefill", step=2), 101.0)
    workers.on_heartbeat(DECODE, beat("decode", step=2), 101.0)
    plan = planning.look()
    page = generate_latest(shown).decode()
    assert plan.wanted("prefill") >= 2
    assert f'diptych_pool_wanted_workers{{engine="router",role="prefill"}} {plan.wanted("prefill")}.0' in page
    assert "diptych_offered_requests_per_second" in page and 'kind="measured",slo="ttft"} 0.2' in page
    line = next(record for record in caplog.records if record.message.startswith("planner: wants "))
    assert line.__dict__["reason"].startswith("grows from 1: prompts")
    assert line.__dict__["requests_per_s"] == pytest.approx(40.0)
    said = len(caplog.records)
    planning.look()
    assert len(caplog.records) == said, "nothing changed"


def test_a_size_that_may_be_too_small_is_not_exported() -> None:
    """Autoscalers change nothing without the metric."""
    workers = registry(prefill=beat("prefill"), decode=beat("decode"))
    planning, _, now = loop(workers)
    shown, wanted = CollectorRegistry(), b"diptych_pool_wanted_workers{"
    shown.register(PlanCollector(lambda: planning.outlook, {"engine": "router"}))
    planning.look()
    assert wanted not in generate_latest(shown)
    now[0] = 91.0
    for role, address in (("prefill", PREFILL), ("decode", DECODE)):
        workers.on_heartbeat(address, beat(role, step=2), 91.0)
    planning.look()
    assert wanted in generate_latest(shown)


def test_infeasible_goals_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    workers = registry(prefill=beat("prefill"), decode=beat("decode"))
    planning, window, now = loop(workers, slo_tpot_ms=2.0)
    for second in range(30):
        window.arrived(float(second))
        window.ended(SampledRequest(100, 0, 20), float(second))
    now[0] = 30.0
    planning.look()
    for number in range(1, 10):  # another number at each look
        slower = StepModel(fixed_s=0.01 * number, row_s=3e-5, num_steps=99)
        workers.on_heartbeat(DECODE, beat("decode", slower), 30.0)
        planning.look()
    assert caplog.text.count("TPOT of 2 ms at p95 cannot be met") == 1
    for second in range(30, 95):
        window.arrived(float(second), 3)
    now[0] = 95.0
    workers.on_heartbeat(PREFILL, beat("prefill", step=2), 95.0)
    slower = StepModel(fixed_s=0.02, row_s=3e-5, num_steps=199)
    workers.on_heartbeat(DECODE, beat("decode", slower, step=2), 95.0)
    planning.look()
    assert caplog.text.count("TPOT of 2 ms at p95 cannot be met") == 2


@pytest.mark.slow
async def test_the_scaler_gets_each_plan_but_none_without_data() -> None:
    workers, scaler = registry(prefill=beat("prefill"), decode=beat("decode")), create_autospec(Scaler, instance=True)
    scaler.deployed.return_value = DeployedPools({"prefill": 1, "decode": 1}, {}, 0)
    planning, _, _ = loop(workers, scaler, planner_interval_s=0.1)
    planning.start()
    await until(lambda: scaler.scale.await_count)
    assert scaler.scale.await_args_list[0] == call({"prefill": 1, "decode": 1})
    workers.on_cut(DECODE)
    await asyncio.sleep(0.25)
    asked = scaler.scale.await_count
    await asyncio.sleep(0.25)
    assert scaler.scale.await_count == asked
    assert planning.outlook is not None and "silent" in planning.outlook.plan.held
    await planning.close()
    scaler.close.assert_awaited_once()
    assert not planning.failure and not scaler.wake.called and not scaler.yield_lead.called


async def test_a_planner_that_ends_is_a_failure_of_the_router() -> None:
    planning, _, _ = loop(registry())
    planning._workers = lambda: 1 / 0  # type: ignore[assignment, return-value]
    planning.start()
    await until(lambda: planning.failure)
    assert "ZeroDivisionError" in planning.failure
    await planning.close()


def test_workers_that_change_roles_are_counted_by_home() -> None:
    workers, observer = registry(prefill=beat("prefill"), decode=beat("decode")), PoolObserver(("prefill", "decode"))
    assert observer.homes(workers.workers.values()) == {}, "their roles are pinned"
    for worker in workers.workers.values():
        assert worker.hello is not None
        worker.hello = msgspec.structs.replace(worker.hello, changes_role=True)
    workers.workers[PREFILL].role = "decode"
    assert observer.homes(workers.workers.values()) == {"prefill": 1, "decode": 1}
    workers.workers[PREFILL].withheld = "it leaves"
    assert observer.homes(workers.workers.values()) == {"prefill": 0, "decode": 1}
