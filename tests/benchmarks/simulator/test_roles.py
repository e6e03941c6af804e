"""Workers that change their roles in virtual time: production's policy decides, and nothing is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from benchmarks.simulator.report import Findings
from benchmarks.simulator.simulation import Run, Simulation
from benchmarks.simulator.workers.process import ROLE_DRAIN_S
from benchmarks.simulator.world.scenario import Scenario, read_scenario
from common.wire.messages import ChangeRole, WorkerHeartbeat
from router.dispatch import role_changes
from router.planner import split

PREFILL = {"coefficients": {"fixed_s": 0.01, "token_s": 2e-4}, "start_s": 1.0, "role_change_s": 0.1}
DECODE = {"coefficients": {"fixed_s": 0.04, "row_s": 0.002, "token_s": 2e-4}, "start_s": 1.0, "role_change_s": 0.1}
CHANGING = {
    "prefill": PREFILL | {"other_role": {"coefficients": DECODE["coefficients"], "slo_tpot_ms": 0.0}},
    "decode": DECODE | {"other_role": {"coefficients": PREFILL["coefficients"]}, "slo_tpot_ms": 0.0},
}
ALTERNATING = Path(__file__).parents[3] / "benchmarks" / "data" / "alternating.toml"


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Role changes come sooner than by default."""
    monkeypatch.setattr(role_changes, "CHANGE_AFTER_S", 1.0)
    monkeypatch.setattr(role_changes, "CHANGE_INTERVAL_S", 3.0)
    monkeypatch.setattr(split, "CHANGE_INTERVAL_S", 3.0)


def alternating(**values: Any) -> Scenario:
    """40 s of the scenario that changes every 20 s from long prompts to long answers."""
    scenario = read_scenario(ALTERNATING)
    load = scenario.load
    parts = tuple(replace(part, begin_s=0.5 * part.begin_s, end_s=0.5 * part.end_s) for part in load.parts)
    load = replace(load, parts=parts, period_s=0.5 * load.period_s)
    return replace(scenario, load=load, **({"duration_s": 40.0} | values))


def home(scenario: Callable[..., Scenario], **values: Any) -> Simulation:
    """Workers that would change, and routers that do not order it."""
    return Simulation(scenario(**(CHANGING | {"load": {"rate": 1.0}} | values)))


def behind(scenario: Callable[..., Scenario], **values: Any) -> Simulation:
    """Prompts for three prefill workers, with two of them, and answers for one decode worker."""
    settings = {"role_change": True}
    load = {"rate": 3.5, "input_len": "4000", "output_len": "16"}
    return Simulation(
        scenario(**(CHANGING | {"load": load, "settings": settings, "warm": True, "duration_s": 6.0} | values))
    )


def order(simulation: Simulation, worker: str, role: Any, at_s: float) -> None:
    """Have a router order a worker to change its role."""
    process, router = simulation.processes[worker], simulation.routers[0]
    message = ChangeRole(role=role, reason="a test")
    simulation.world.clock.at(at_s, lambda: router._send(process.address, message) and None)


@pytest.mark.slow
def test_roles_follow_the_load() -> None:
    """The first part takes prefill workers, the second decode workers; the end of the run checks the books."""
    simulation = Simulation(alternating())
    roles = list[tuple[float, int]]()

    def look() -> None:
        roles.append((simulation.world.clock.now, sum(w.role == "prefill" for w in simulation.workers.values())))
        simulation.world.clock.after(1.0, look)

    look()
    run = simulation.run()
    assert run.num_role_changes >= 2
    assert max(num for at_s, num in roles if at_s < 20.0) > min(num for at_s, num in roles if at_s > 25.0)
    found = Findings.of(run)
    assert found.num_ok + found.num_refused == found.num_requests
    assert len(found.good_by_part) == 2
    counted = simulation.routers[0].registry.role_changes
    assert counted["prefill", "decode"] + counted["decode", "prefill"] == run.num_role_changes


def outcomes(run: Run) -> list[tuple[str, float, float]]:
    return [(request.outcome, request.first_token_at, request.ended_at) for request in run.requests]


@pytest.mark.slow
def test_the_same_seed_changes_the_same_roles(scenario: Callable[..., Scenario]) -> None:
    first, second = (behind(scenario, seed=5, routers=2).run() for _ in range(2))
    assert outcomes(first) == outcomes(second)
    assert first.num_role_changes == second.num_role_changes > 0
    assert first.num_events == second.num_events


@pytest.mark.slow
def test_one_router_gives_the_orders(scenario: Callable[..., Scenario]) -> None:
    """Every worker names the one with the least id; the others see what came of it."""
    simulation = behind(scenario, routers=3)
    heard = list[WorkerHeartbeat]()
    router = simulation.routers[2]
    router.hear_beats = lambda beats, hear=router.hear_beats: (heard.extend(beat for _, beat in beats), hear(beats))
    num_changes = simulation.run().num_role_changes
    assert {beat.planner for beat in heard[-8:]} == {"router-0"}
    assert num_changes > 0
    assert all(one.registry.role_changes.total() == num_changes for one in simulation.routers)


def test_pinned_workers_ignore_orders(scenario: Callable[..., Scenario]) -> None:
    simulation = Simulation(scenario())
    order(simulation, "decode-0", "prefill", 2.0)
    assert simulation.run().num_role_changes == 0
    assert not simulation.routers[0].registry.workers["tcp://decode-0:7001"].identity.changes_role


def test_a_new_duty_has_an_empty_pool_and_a_new_epoch(scenario: Callable[..., Scenario]) -> None:
    simulation = home(scenario, load={"rate": 5.0, "output_len": "5"})
    process = simulation.processes["prefill-0"]
    before = list[int]()
    simulation.world.clock.at(4.9, lambda: before.append(process.duty.scheduler.pool.counts.cached))
    order(simulation, "prefill-0", "decode", 5.0)
    simulation.run()
    worker = simulation.routers[0].registry.workers[process.address]
    assert before[0] > 0
    assert (worker.role, worker.home, worker.epoch) == ("decode", "prefill", process.duty.epoch)
    assert process.duty.role == "decode" and process.duty.num_output_tokens > 0
    assert process.duties["prefill"].scheduler.pool.counts.cached == 0
    assert process.duties["prefill"].num_prompt_tokens > 0


@pytest.mark.slow
def test_what_is_learnt_is_kept_for_each_role(scenario: Callable[..., Scenario]) -> None:
    """There and back: the fit of prefill steps is the one of before, and that of decode steps is another."""
    simulation = home(scenario, fit=True, load={"rate": 4.0, "output_len": "20"}, duration_s=14.0)
    process = simulation.processes["prefill-0"]
    fits = dict[float, Any]()
    for at_s in (4.9, 7.0, 9.9):
        simulation.world.clock.at(at_s, lambda at_s=at_s: fits.update({at_s: process.duty.model}))
    order(simulation, "prefill-0", "decode", 5.0)
    order(simulation, "prefill-0", "prefill", 8.0)
    simulation.run()
    assert process.num_role_changes == 2 and process.duty.role == "prefill"
    assert fits[9.9].num_steps >= fits[4.9].num_steps > 0
    assert process.learnt("decode").fit.model.num_steps > 0


def test_a_worker_that_does_not_get_empty_stays(scenario: Callable[..., Scenario]) -> None:
    """The last decode worker has nowhere to leave its streams."""
    decode = CHANGING["decode"] | {"count": 1, "coefficients": {"fixed_s": 0.5}}
    simulation = home(scenario, decode=decode, load={"rate": 2.0, "input_len": "50", "output_len": "100"})
    process, states = simulation.processes["decode-0"], dict[float, str]()
    worker = simulation.routers[0].registry.workers[process.address]
    for at_s in (4.0, 5.0 + ROLE_DRAIN_S + 2.0):
        simulation.world.clock.at(at_s, lambda at_s=at_s: states.update({at_s: str(worker.state)}))
    order(simulation, "decode-0", "prefill", 3.0)
    run = simulation.run()
    assert run.num_role_changes == 0
    assert list(states.values()) == ["draining", "ready"]
    assert {request.outcome for request in run.requests} <= {"ok", "Overloaded"}


@pytest.mark.parametrize("kind", ("death", "silence", "stop"))
@pytest.mark.parametrize("at_s", (3.05, 3.6, pytest.param(6.0, marks=pytest.mark.slow)))
def test_a_worker_ends_amid_a_change_or_after_it(scenario: Callable[..., Scenario], kind: str, at_s: float) -> None:
    """One that is started again is what it was started as."""
    back = {"back_s": 1.0} if kind != "stop" else {}
    prefill = CHANGING["prefill"] | {"role_change_s": 1.0}
    simulation = home(
        scenario,
        prefill=prefill,
        load={"rate": 6.0, "input_len": "100-400"},
        event=[{"at_s": at_s, "kind": kind, "worker": "prefill-0"} | back],
    )
    order(simulation, "prefill-0", "decode", 3.0)
    run = simulation.run()
    process = simulation.processes["prefill-0"]
    assert process.exists is (kind != "stop")
    assert process.duty.role == "prefill"
    assert process.num_role_changes == (at_s == 6.0 or kind == "stop")
    assert {request.outcome for request in run.requests} == {"ok"}


def test_a_worker_that_stops_gives_its_drain_for_another_role_up(scenario: Callable[..., Scenario]) -> None:
    prefill = CHANGING["prefill"] | {"coefficients": {"fixed_s": 1.0}}
    event = [{"at_s": 3.5, "kind": "stop", "worker": "prefill-0"}]
    simulation = home(scenario, prefill=prefill, load={"rate": 2.0}, event=event)
    order(simulation, "prefill-0", "decode", 3.0)
    run = simulation.run()
    process = simulation.processes["prefill-0"]
    assert (process.num_role_changes, process.exists) == (0, False)
    assert {request.outcome for request in run.requests} == {"ok"}


def test_a_decode_worker_hands_its_streams_over_and_changes(scenario: Callable[..., Scenario]) -> None:
    """Its streams last 10 s and more; it is a prefill worker within one."""
    load = {"rate": 3.0, "input_len": "200", "output_len": "250"}
    simulation = home(scenario, load=load, duration_s=8.0, settings={"max_retries": 0})
    process = simulation.processes["decode-0"]
    roles = list[str]()
    simulation.world.clock.at(5.0, lambda: roles.append(process.duty.role))
    simulation.world.clock.at(6.0, lambda: roles.append(process.duty.role))
    order(simulation, "decode-0", "prefill", 5.0)
    run = simulation.run()
    assert roles == ["decode", "prefill"]
    assert run.num_handovers["done"] >= 3
    assert {request.outcome for request in run.requests} == {"ok"}
    assert run.conserved.num_answer_tokens == run.conserved.num_computed_tokens
