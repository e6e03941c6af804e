"""Goals lower the share of requests within them at no load: open and closed, with each resource as the limit."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.simulator.simulation import Simulation
from benchmarks.simulator.world.load import SimulatedRequest
from benchmarks.simulator.world.scenario import scenario_of
from common.errors import RETRY_AFTER_S

SLOW = {"fixed_s": 5e-3, "token_s": 3e-4, "pair_s": 6e-8}
"""A prompt of 512 tokens takes 174 ms."""
FAST = {"fixed_s": 4e-3, "floor_s": 8e-3, "token_s": 4e-5, "pair_s": 1.5e-9}
FAST_ROWS = FAST | {"row_s": 3e-5, "context_s": 2.5e-8}
CPU: dict[str, Any] = {"steps": (SLOW, SLOW | {"fixed_s": 12e-3, "row_s": 5e-4, "context_s": 1e-7}), "rate": 5.75}
DECODE: dict[str, Any] = CPU | {"steps": (SLOW, SLOW | {"fixed_s": 8e-3, "row_s": 2.2e-3, "context_s": 1e-7})}
GPU: dict[str, Any] = {"steps": (FAST, FAST_ROWS), "rate": 14.0, "num_blocks": 25_000, "goals": (500.0, 25.0)}
GPU |= {"input_len": "400-4000", "output_len": "50-300"}
KV: dict[str, Any] = GPU | {"num_blocks": 4096}
"""The limit is the prefill worker (CPU and GPU), the decode worker, or KV blocks, of which 29 sequences take all.
`rate` is about what the service can do, except that KV blocks suffice for 0.8 of it."""


def attained(
    refuse: str, *, steps: Any, rate: float, share: float = 0.0, clients: int = 0, num: int = 150,
    num_blocks: int = 4096, goals: tuple[float, float] = (300.0, 30.0), input_len: str = "512", output_len: str = "64",
    seed: int = 1,
) -> float:  # fmt: skip
    """Share of requests within goals, with workers that fit their models. `refuse` "": nothing is told of the goals."""
    pools = [
        {"name": role, "role": role, "coefficients": each, "num_blocks": num_blocks}
        for role, each in zip(("prefill", "decode"), steps, strict=True)
    ]
    settings: dict[str, Any] = {"slo_refuse": refuse} if refuse else {"slo_ttft_ms": 0.0, "slo_tpot_ms": 0.0}
    if not refuse:
        pools = [pool | {"slo_tpot_ms": 0.0} for pool in pools]
    per_s = share * rate or 1000.0
    scenario = scenario_of(
        {
            "pool": pools,
            "load": {"rate": per_s, "input_len": input_len, "output_len": output_len},
            "goals": dict(zip(("ttft_ms", "tpot_ms"), goals, strict=True)),
            "settings": settings,
            "seed": seed,
            "duration_s": num / per_s,
            "fit": True,
        }
    )
    simulation = Closed(scenario, clients) if clients else Simulation(scenario)
    requests = simulation.run().requests
    return sum(request.meets(*goals) for request in requests) / len(requests)


class Closed(Simulation):
    """Each of `clients` sends its next request when the last one has ended, or a second after it was refused."""

    def __init__(self, scenario: Any, clients: int) -> None:
        super().__init__(scenario)
        self._clients = clients

    def _arrive(self) -> None:
        for _ in range(self._clients):
            self._send()

    def _send(self) -> None:
        if self._next < len(self.requests):
            request, self._next = self.requests[self._next], self._next + 1
            request.arrival_s = self.world.clock.now
            self.routers[0].ask(request)

    def _on_over(self, request: SimulatedRequest) -> None:
        super()._on_over(request)
        self.world.clock.after(1e-3 if request.outcome == "ok" else RETRY_AFTER_S, self._send)


OPEN = (0.1, 0.3, 0.5, 0.7, 0.9, 1.2, 1.5)
SWEEP = [
    *(pytest.param(CPU | {"clients": num}, id=f"cpu-{num}-clients") for num in range(1, 9)),
    *(pytest.param(CPU | {"share": share}, id=f"cpu-{share}") for share in OPEN),
    *(pytest.param(DECODE | {"share": share}, id=f"decode-{share}") for share in OPEN),
    *(pytest.param(GPU | {"share": share}, id=f"gpu-{share}") for share in OPEN),
    *(pytest.param(KV | {"share": share}, id=f"kv-{share}") for share in OPEN),
]
CHANCE = 0.01
"""Difference that a single run of 150 requests may show."""


@pytest.mark.slow
@pytest.mark.parametrize("point", SWEEP)
def test_goals_are_met_at_least_as_often_as_without_them(point: dict[str, Any]) -> None:
    assert attained("overload", **point) >= attained("", **point) - CHANCE


def test_goals_help_where_each_resource_is_the_limit() -> None:
    assert attained("overload", **CPU, clients=6, num=60) >= attained("", **CPU, clients=6, num=60) - CHANCE
    assert attained("overload", **CPU, share=1.2) > 0.3 > 0.1 > attained("", **CPU, share=1.2)
    assert attained("overload", **DECODE, share=1.1) > attained("", **DECODE, share=1.1) + 0.1
