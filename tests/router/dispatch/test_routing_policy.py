"""Other policies than the built-in one, in routers and simulations: the documented example, and one that fails."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.simulator.simulation import Simulation
from benchmarks.simulator.world.scenario import scenario_of
from router.observe.metrics import RouterMetrics
from router.policy.plugins import GuardedPolicy

FAILS = """
from router.policy import Policy

class Fails(Policy):
    def choose(self, prefill, decode, shape, now):
        raise ZeroDivisionError
"""
POOL = {"coefficients": {"fixed_s": 5e-3, "token_s": 4e-5, "row_s": 2e-4}, "count": 2}
SCENARIO = {
    "duration_s": 3.0,
    "pool": [{"name": "p", "role": "prefill", **POOL}, {"name": "d", "role": "decode", **POOL}],
    "load": {"rate": 10.0, "input_len": "100-600", "output_len": "5-20"},
}


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repository: Path) -> Iterator[str]:
    """The example of the page as a module, and one with a policy that fails. Yields the example's module:Class."""
    page = (repository / "docs" / "contributing" / "add-a-routing-policy.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (name,) = re.findall(r"--routing-policy (\S+)", page)
    module = name.partition(":")[0]
    (tmp_path / f"{module}.py").write_text(code)
    (tmp_path / "fails.py").write_text(FAILS)
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    for one in (module, "fails"):
        sys.modules.pop(one, None)


def test_the_example_routes_in_a_simulation(modules: str) -> None:
    run = Simulation(scenario_of(SCENARIO | {"policy": modules})).run()
    assert len(run.requests) > 10 and all(request.outcome == "ok" for request in run.requests)
    assert run.num_policy_errors == 0 and run.num_choices["remote"] + run.num_choices["local"] == len(run.requests)


def test_a_policy_that_fails_harms_no_simulation(modules: str) -> None:
    failed, usual = (Simulation(scenario_of(SCENARIO | {"policy": name})).run() for name in ("fails:Fails", "diptych"))
    assert failed.num_policy_errors >= len(failed.requests) > 10 and usual.num_policy_errors == 0
    assert failed.num_choices == usual.num_choices and failed.seconds == usual.seconds


async def test_the_example_routes_in_a_router(modules: str, cluster: Any, tools: Any) -> None:
    dispatcher = await cluster.start(prefill=2, decode=2, routing_policy=modules)
    assert isinstance(dispatcher.core.policy, GuardedPolicy)
    for _ in range(4):
        request = tools.request()
        tokens, _ = await tools.collect(dispatcher, request)
        assert tokens == tools.expected(list(request.prompt_token_ids), 8)
    load = dispatcher.load()
    assert sum(load.num_choices.values()) == 4 and load.num_policy_errors == 0


async def test_a_policy_that_fails_harms_no_router(modules: str, cluster: Any, tools: Any) -> None:
    dispatcher = await cluster.start(routing_policy="fails:Fails")
    request = tools.request()
    tokens, _ = await tools.collect(dispatcher, request)
    assert tokens == tools.expected(list(request.prompt_token_ids), 8)
    assert (num_errors := dispatcher.load().num_policy_errors) > 0
    page = RouterMetrics("m", dispatcher.load).snapshot()().decode()
    assert re.search(rf"^diptych_routing_policy_errors_total{{.*}} {num_errors}\.0$", page, re.MULTILINE)
