"""A model with a window in virtual time: production's schedulers own less, and less crosses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.simulator.simulation import Simulation
from benchmarks.simulator.world.scenario import Scenario

pytestmark = pytest.mark.slow

SHORTLIST_ABOVE: dict[str, Any] = {"num_blocks": 160}
MODEL = {"max_model_len": 8192, "kv_bytes_per_token": 131_072}


def test_sequences_that_are_longer_than_the_cache_are_served(scenario: Callable[..., Scenario]) -> None:
    """2,560 tokens fit into each worker; with a window of 256, prompts of 4,000 come through, and streams move."""
    load = {"rate": 3.0, "input_len": "3000-4000", "output_len": "50-400"}
    event = [{"at_s": 4.0, "kind": "stop", "worker": "decode-0"}]
    prefill = SHORTLIST_ABOVE | {"max_step_tokens": 512}
    made = scenario(prefill=prefill, decode=SHORTLIST_ABOVE, load=load, model=MODEL | {"window": 256}, event=event)
    run = Simulation(made).run()
    assert {request.outcome for request in run.requests} == {"ok"}
    assert run.num_handovers["done"] > 0
    without = Simulation(scenario(prefill=prefill, decode=SHORTLIST_ABOVE, load=load, model=MODEL)).run()
    assert "ok" not in {request.outcome for request in without.requests}


def test_the_bytes_of_a_transfer_are_those_of_the_window(scenario: Callable[..., Scenario]) -> None:
    load = {"rate": 3.0, "input_len": "1000", "output_len": "20"}
    sent = {}
    for window in (0, 256):
        made = scenario(load=load, model=MODEL | {"window": window}, settings={"local_prefill_threshold": 0})
        simulation = Simulation(made)
        run = simulation.run()
        assert {request.outcome for request in run.requests} == {"ok"}
        sent[window] = sum(simulation.processes[f"prefill-{number}"].outbound.num_bytes for number in range(2))
        sent[window] /= len(run.requests) * 16 * 131_072
    assert sent == {0: 63.0, 256: 17.0}
