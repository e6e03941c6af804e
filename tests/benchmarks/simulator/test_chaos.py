"""Deaths, stops, changes of roles and hand-overs at random times: the books balance, and a seed gives one result."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.simulator.simulation import Run, Simulation
from benchmarks.simulator.workers.process import Process
from benchmarks.simulator.world.scenario import Scenario
from common.wire.messages import ChangeRole

PREFILL = {"fixed_s": 0.01, "token_s": 2e-4}
DECODE = {"fixed_s": 0.01, "row_s": 0.002, "token_s": 2e-4}
KINDS = ("death", "silence", "stop", "slow", "router_death")


def chaos(scenario: Callable[..., Scenario], seed: int) -> Simulation:
    """Two routers and four workers that change their roles, to which up to six things happen, and five orders go."""
    source = random.Random(seed)
    pool = {"start_s": 0.3, "role_change_s": source.choice((0.0, 0.05, 0.7)), "link_rate": source.choice((2e8, 2e9))}
    made = scenario(
        prefill=pool | {"coefficients": PREFILL, "other_role": {"coefficients": DECODE}},
        decode=pool
        | {"coefficients": DECODE, "other_role": {"coefficients": PREFILL}, "num_blocks": source.choice((300, 4096))},
        event=[happening(source) for _ in range(source.randint(2, 6))],
        load={"rate": source.choice((4.0, 10.0)), "input_len": "50-2000", "output_len": "1-200"},
        settings={"max_retries": 20},
        routers=2,
        seed=seed,
        duration_s=6.0,
    )
    simulation = Simulation(made)
    for _ in range(5):
        process = simulation.processes[source.choice(list(simulation.processes))]
        message = ChangeRole(role=source.choice(("prefill", "decode")), reason="a test")
        simulation.world.clock.at(source.uniform(0.5, 6.0), order(simulation, process, message))
    return simulation


def happening(source: random.Random) -> dict[str, Any]:
    kind = source.choice(KINDS)
    names = ("router-0", "router-1") if kind == "router_death" else ("prefill-0", "prefill-1", "decode-0", "decode-1")
    return {
        "at_s": source.uniform(1.0, 5.0),
        "kind": kind,
        "worker": source.choice(names),
        "back_s": source.choice((0.3, 1.0)),
        "factor": 2.0,
    }


def order(simulation: Simulation, process: Process, message: ChangeRole) -> Callable[[], None]:
    def send() -> None:
        for router in simulation.routers:
            if router.alive:
                simulation.world.tell_worker(router.name, process.address, message)
                return

    return send


def ends(run: Run) -> str:
    """As text: NaN is not NaN."""
    return repr([(request.outcome, request.first_token_at, request.ended_at) for request in run.requests])


@pytest.mark.slow_except("2")
@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_lost_whatever_happens(scenario: Callable[..., Scenario], seed: int) -> None:
    run = chaos(scenario, seed).run()
    assert all(request.outcome for request in run.requests)
    assert run.conserved.num_answer_tokens <= run.conserved.num_computed_tokens
    if not seed:
        assert ends(chaos(scenario, seed).run()) == ends(run)


@pytest.mark.slow
def test_all_of_it_happens(scenario: Callable[..., Scenario]) -> None:
    """Among the seeds above there are changes of roles, hand-overs and lost connections."""
    runs = [chaos(scenario, seed).run() for seed in range(4)]
    assert sum(run.num_role_changes for run in runs) > 2
    assert sum(run.num_handovers["done"] for run in runs) > 1
    assert sum(request.outcome == "ConnectionLost" for run in runs for request in run.requests) > 2
    assert sum(request.outcome == "ok" for run in runs for request in run.requests) > 50
