"""Models that share nothing but time, and links where their pools say so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from benchmarks.simulator.__main__ import main
from benchmarks.simulator.simulation import Run, Simulation
from benchmarks.simulator.world.scenario import Scenario
from common.errors import ConfigError


def both(scenario: Callable[..., Scenario], link: str = "", **values: Any) -> Scenario:
    """Two models, with other lengths and rates. With `link`, prefill workers of both share one."""
    shared = {"link": link, "link_rate": 2e9, "count": 1}
    first = scenario(name="a", prefill=shared, load={"rate": 5.0, "input_len": "1000"}, duration_s=6.0)
    second = scenario(name="b", prefill=shared, load={"rate": 4.0, "input_len": "1200"}, duration_s=4.0, seed=3)
    made = replace(first, also=(replace(second, **values),))
    made.check()
    return made


def ends(run: Run) -> list[tuple[str, float, float]]:
    return [(request.outcome, request.first_token_at, request.ended_at) for request in run.requests]


@pytest.mark.slow
def test_models_are_as_each_alone(scenario: Callable[..., Scenario]) -> None:
    made = both(scenario, event=(), model=replace(scenario().model, block_size=32))
    run = Simulation(made).run()
    alone = [Simulation(one).run() for one in (replace(made, also=()), made.also[0])]
    assert [ends(one) for one in (run, *run.others)] == [ends(one) for one in alone]
    for one, other in zip((run, *run.others), alone, strict=True):
        assert (one.seconds, one.worker_seconds) == (other.seconds, other.worker_seconds)
    assert run.seconds != run.others[0].seconds


@pytest.mark.slow
def test_they_share_a_link_where_their_pools_name_it(scenario: Callable[..., Scenario]) -> None:
    """A prompt's KV takes as long on the link as its computing: what the other model sends costs time."""
    apart, together = (Simulation(both(scenario, link)).run() for link in ("", "host"))
    waits = []
    for run in (apart, together):
        waits.append(
            sum(request.ended_at - request.arrival_s for one in (run, *run.others) for request in one.requests)
        )
        assert {request.outcome for one in (run, *run.others) for request in one.requests} == {"ok"}
    assert waits[1] > waits[0] + 0.1
    assert together.conserved.num_bytes == pytest.approx(apart.conserved.num_bytes)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_result(scenario: Callable[..., Scenario]) -> None:
    first, second = (Simulation(both(scenario, "host")).run() for _ in range(2))
    assert ends(first) == ends(second) and ends(first.others[0]) == ends(second.others[0])
    assert first.num_events == second.num_events


@pytest.mark.parametrize(
    ("values", "words"),
    (
        ({"name": ""}, "name='': must be unique among the models"),
        ({"name": "a"}, "name='a': must be unique among the models"),
    ),
)
def test_each_model_has_a_name(scenario: Callable[..., Scenario], values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        both(scenario, **values)


def test_a_link_has_one_rate(scenario: Callable[..., Scenario]) -> None:
    pool = {"link": "host", "link_rate": 1e9}
    with pytest.raises(ConfigError, match="pool.link_rate=2000000000.0: must be 1e\\+09, the rate of the link host"):
        scenario(prefill=pool, decode=pool | {"link_rate": 2e9})


@pytest.mark.slow
def test_the_command_shows_each_model(
    scenario: Callable[..., Scenario], tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "both.json"
    file.write_bytes(msgspec.json.encode(both(scenario)))
    assert main([str(file), "--no-progress", "--policy", "random", "--seed", "7"]) == 0
    printed = capsys.readouterr().out
    assert "a, random" in printed and "b, random" in printed
