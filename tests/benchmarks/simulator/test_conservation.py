"""The books of a simulation: each kind of loss is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.simulator.conservation import check_conserved
from benchmarks.simulator.simulation import Simulation
from benchmarks.simulator.workers.transfer import Transfer
from benchmarks.simulator.world.errors import ConservationError
from benchmarks.simulator.world.scenario import Scenario
from common.errors import BlockError
from common.latency.step_model import StepShape


def no_end(simulation: Simulation) -> None:
    simulation.requests[0].outcome = ""


def lost_token(simulation: Simulation) -> None:
    simulation.requests[0].num_tokens -= 1


def token_from_nowhere(simulation: Simulation) -> None:
    for worker in simulation.workers.values():
        worker.num_output_tokens //= 2


def lost_block(simulation: Simulation) -> None:
    simulation.workers["decode-0"].scheduler.pool.allocate(1)


def booking(simulation: Simulation) -> None:
    simulation.routers[1].registry.book("tcp://decode-0:7001", 0.0, prompt=StepShape(), num_blocks=1)


def open_transfer(simulation: Simulation) -> None:
    worker: Any = simulation.workers["prefill-0"]
    other: Any = simulation.workers["decode-0"]
    worker._open["0"] = Transfer(simulation.world, worker, other, "0", 0, 1, 1)


def open_flow(simulation: Simulation) -> None:
    (_, out), (into, _) = (simulation.world.links[name] for name in ("prefill-0", "decode-0"))
    network = simulation.world.network
    network.add(network.open(out, into, lambda: None), 100.0)


def lost_bytes(simulation: Simulation) -> None:
    simulation.processes["decode-1"].inbound.num_bytes -= 1000.0


@pytest.mark.parametrize(
    ("spoil", "words"),
    (
        (no_end, "request 0 has no end"),
        (lost_token, "request 0 got .* tokens instead of"),
        (token_from_nowhere, "clients got .* tokens, workers sampled"),
        (lost_block, "1 of 4096 blocks have mismatched reference counts"),
        (booking, "1 bookings are left on tcp://decode-0:7001"),
        (open_transfer, "prefill-0 has 1 transfers open"),
        (open_flow, "1 flows are left on the link"),
        (lost_bytes, "bytes were shipped, .* received and dropped"),
    ),
)
def test_what_does_not_balance_is_found(
    scenario: Callable[..., Scenario], spoil: Callable[[Simulation], None], words: str
) -> None:
    simulation = Simulation(scenario(duration_s=3.0, routers=2))
    simulation.run()
    books = (simulation.world, list(simulation.processes.values()), simulation.routers, simulation.requests)
    check_conserved(*books)
    spoil(simulation)
    with pytest.raises((ConservationError, BlockError), match=words):
        check_conserved(*books)


def test_a_dead_router_has_no_books(scenario: Callable[..., Scenario]) -> None:
    """What it had booked is gone with it."""
    event = [{"at_s": 2.0, "kind": "router_death", "worker": "router-1"}]
    simulation = Simulation(scenario(duration_s=3.0, routers=2, event=event))
    simulation.run()
    booking(simulation)
    check_conserved(simulation.world, list(simulation.processes.values()), simulation.routers, simulation.requests)


def test_a_worker_with_requests_does_not_change_its_role(scenario: Callable[..., Scenario]) -> None:
    simulation = Simulation(scenario(duration_s=3.0, load={"output_len": "300"}))
    simulation.world.clock.at(2.5, simulation.workers["decode-1"].close)
    with pytest.raises(ConservationError, match="decode-1 changes its role with .* requests"):
        simulation.run()
