"""Routers that die in virtual time: their clients fail, workers let go, the other routers go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.simulator.report import Findings
from benchmarks.simulator.router import CONNECTION_LOST
from benchmarks.simulator.simulation import Run, Simulation
from benchmarks.simulator.world.scenario import Scenario

DEATH = {"at_s": 4.0, "kind": "router_death", "worker": "router-0"}
LOAD = {"rate": 8.0, "output_len": "100-250"}


def num_lost(run: Run) -> int:
    return sum(request.outcome == CONNECTION_LOST for request in run.requests)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_its_clients_fail_and_the_others_are_served(scenario: Callable[..., Scenario], seed: int) -> None:
    """`Simulation.run` checks the books: no block, transfer or booking is left of what was lost."""
    simulation = Simulation(scenario(routers=2, event=[DEATH], load=LOAD, seed=seed))
    run = simulation.run()
    assert num_lost(run) > 3
    lost = [request for request in run.requests if request.outcome == CONNECTION_LOST]
    assert all(request.arrival_s <= 4.0 and request.number % 2 == 0 and request.ended_at == 4.0 for request in lost)
    found = Findings.of(run)
    assert found.num_failed == len(lost) and found.num_ok == found.num_requests - len(lost)
    later = [request for request in run.requests if request.arrival_s > 4.0]
    assert len(later) > 20
    assert [router.alive for router in simulation.routers] == [False, True]


@pytest.mark.slow
def test_workers_release_what_it_owned(scenario: Callable[..., Scenario]) -> None:
    """They decode on for two heartbeats, until they miss it."""
    simulation = Simulation(scenario(routers=2, event=[DEATH], load=LOAD))
    held = dict[float, int]()

    def look(at_s: float) -> None:
        sequences = [sequence for worker in simulation.workers.values() for sequence in worker.scheduler]
        held[at_s] = sum(sequence.router == b"router-0" for sequence in sequences)

    for at_s in (3.99, 4.4, 4.6):
        simulation.world.clock.at(at_s, lambda at_s=at_s: look(at_s))
    simulation.run()
    assert held[3.99] > 3 and held[4.4] > 0 and held[4.6] == 0


def test_without_any_router_all_later_clients_fail(scenario: Callable[..., Scenario]) -> None:
    run = Simulation(scenario(event=[DEATH], load=LOAD)).run()
    assert {request.outcome for request in run.requests if request.arrival_s > 4.0} == {CONNECTION_LOST}
    assert "ok" in {request.outcome for request in run.requests}


@pytest.mark.slow
def test_another_router_is_started(scenario: Callable[..., Scenario]) -> None:
    """It learns of the workers by itself, and clients go to it once it would serve them."""
    event = [DEATH | {"back_s": 1.0}]
    simulation = Simulation(scenario(event=event, load=LOAD))
    run = simulation.run()
    outcomes = [(request.arrival_s, request.outcome) for request in run.requests if request.arrival_s > 4.0]
    assert {outcome for at_s, outcome in outcomes if at_s < 5.0} == {CONNECTION_LOST}
    assert {outcome for at_s, outcome in outcomes if at_s > 6.0} == {"ok"}
    assert [router.name for router in simulation.routers] == [b"router-0", b"router-1"]


@pytest.mark.slow
@pytest.mark.parametrize("at_s", (4.0, 4.1, 4.3))
def test_it_dies_amid_hand_overs(scenario: Callable[..., Scenario], at_s: float) -> None:
    """Streams of the dead router end on both workers, those of the other one go on."""
    slow = {"link_rate": 4e8}
    stop = {"at_s": 4.0, "kind": "stop", "worker": "decode-0"}
    made = scenario(routers=2, event=[stop, DEATH | {"at_s": at_s}], load=LOAD, decode=slow, prefill=slow)
    run = Simulation(made).run()
    assert num_lost(run) > 3
    assert run.num_handovers.total() > 0
    assert {request.outcome for request in run.requests if request.number % 2} == {"ok"}


@pytest.mark.slow
def test_with_deaths_of_workers_nothing_is_lost(scenario: Callable[..., Scenario]) -> None:
    event: list[dict[str, Any]] = [
        DEATH | {"back_s": 2.0},
        {"at_s": 4.2, "kind": "death", "worker": "decode-0", "back_s": 1.0},
        {"at_s": 4.4, "kind": "silence", "worker": "prefill-0", "back_s": 1.0},
        {"at_s": 7.0, "kind": "router_death", "worker": "router-1"},
    ]
    quick = {"start_s": 0.5}
    made = scenario(routers=2, event=event, load={"rate": 12.0}, prefill=quick, decode=quick)
    first, second = (Simulation(made).run() for _ in range(2))
    assert num_lost(first) > 5
    ends = [[(one.outcome, one.first_token_at, one.ended_at) for one in run.requests] for run in (first, second)]
    assert repr(ends[0]) == repr(ends[1])  # NaN is not NaN
    assert first.num_events == second.num_events


@pytest.mark.slow
def test_workers_name_another_planner(scenario: Callable[..., Scenario]) -> None:
    """The one that ordered changes of roles is dead; the next one does it."""
    settings = {"role_change": True}
    simulation = Simulation(scenario(routers=3, event=[DEATH], settings=settings, load=LOAD))
    named = dict[float, set[str]]()

    def look(at_s: float) -> None:
        named[at_s] = {process.planner for process in simulation.processes.values()}

    for at_s in (3.0, 6.0):
        simulation.world.clock.at(at_s, lambda at_s=at_s: look(at_s))
    simulation.run()
    assert named == {3.0: {"router-0"}, 6.0: {"router-1"}}
