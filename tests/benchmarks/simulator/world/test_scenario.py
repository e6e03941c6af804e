"""Scenario files: what is refused, and the command that runs one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.simulator.__main__ import main
from benchmarks.simulator.simulation import Simulation
from benchmarks.simulator.world.load import requests_of
from benchmarks.simulator.world.scenario import Scenario, read_scenario, scenario_of
from common.errors import ConfigError

SCENARIO = """
duration_s = 2
[goals]
ttft_ms = 1000
[load]
rate = 10.0
input_len = "200"
output_len = "10"
[model]
max_model_len = 4096
[[pool]]
name = "prefill"
role = "prefill"
coefficients = { fixed_s = 0.004, token_s = 4e-5 }
num_blocks = 512
[[pool]]
name = "decode"
role = "decode"
coefficients = { fixed_s = 0.008, token_s = 4e-5, row_s = 2e-4 }
num_blocks = 512
"""
POOLS = [{"name": "d", "role": "decode", "coefficients": {"fixed_s": 0.01}}]
LOAD = {"rate": 1.0}


@pytest.mark.parametrize(
    ("values", "words"),
    (
        ({}, "pool"),
        ({"pool": []}, r"pool=\[\]: must be.*length >= 1"),
        ({"pool": [{**POOLS[0], "count": -1}]}, r"pool\[0\].count=-1: must be.*>= 0"),
        ({"pool": [{**POOLS[0], "colour": 1}]}, "colour"),
        ({"pool": [*POOLS, *POOLS]}, "pool.name='d': must be unique among the pools"),
        ({"pool": [{**POOLS[0], "role": "prefill"}]}, "must be decode for at least one pool"),
        ({"load": {"rate": 1.0, "trace": "x"}}, "above 0 without a trace, 0 with one"),
        ({"duration_s": 0.0}, "duration_s=0.0: must be above 0 without a trace"),
        ({"event": [{"at_s": 1.0, "kind": "death", "worker": "d-7"}]}, "event.worker='d-7': must be one of d-0"),
        ({"event": [{"at_s": 1.0, "kind": "start", "worker": "x"}]}, "event.worker='x': must be one of d for start"),
        ({"load": {"rate": 1.0, "parts": [{"rate": 1.0}]}}, "load.parts=1: must be empty with trace"),
        ({"load": {"rate": 1.0, "period_s": 9.0}}, "load.period_s=9.0: must be 0 without parts"),
        ({"load": {"parts": [{"rate": 1.0, "end_s": 21.0}]}}, r"load.parts\[0\].end_s=21.0: must be at most 20"),
        ({"load": {"parts": [{"rate": 1.0, "begin_s": 20.0}]}}, r"load.parts\[0\].begin_s=20.0: must be below 20"),
        ({"load": {"parts": [{"rate": 1.0, "output_len": "x"}]}}, r"load.parts\[0\].output_len='x': must be"),
        ({"noise": 3.0}, r"noise=3.0: must be .*<= 0.5"),
        ({"load": {"rate": 1.0, "input_len": "9-3"}}, "load.input_len='9-3': must be"),
        ({"model": {"max_model_len": 100}}, "model.max_model_len=100: must be at least 640"),
        ({"settings": {"colour": 1}}, "settings.colour=1: must be the name of a router setting"),
        ({"settings": {"max_wait_s": -1.0}}, "max_wait_s=-1.0: must be"),
        ({"policy": "best"}, "policy='best': must be one of diptych, random"),
    ),
)
def test_a_bad_scenario_is_refused(values: dict[str, Any], words: str) -> None:
    given = {} if not values else {"pool": POOLS, "load": LOAD, "duration_s": 20.0} | values
    with pytest.raises(ConfigError, match=words):
        Simulation(scenario_of(given))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^cannot read \S+/none.toml: no such file$"):
        read_scenario(tmp_path / "none.toml")
    for kind in ("TOML", "JSON"):
        file = tmp_path / f"a.{kind.lower()}"
        file.write_text("[[[")
        with pytest.raises(ConfigError, match=f"{file} is not valid {kind}: "):
            read_scenario(file)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "two.toml", tmp_path / "out.json"
    file.write_text(SCENARIO)
    assert main([str(file), "--policy", "diptych,round-robin", "--seed", "4", "--json", str(out), "--no-progress"]) == 0
    printed = capsys.readouterr().out
    assert "round-robin" in printed and "two.toml, seed 4" in printed
    first, second = json.loads(out.read_text())["runs"]
    assert first["scenario"]["seed"] == 4 and second["findings"]["policy"] == "round-robin"
    assert first["findings"]["num_good"] == first["findings"]["num_requests"] > 0
    file.write_text(SCENARIO.replace("rate = 10.0", "rate = -1.0"))
    with pytest.raises(SystemExit, match="2"):
        main([str(file)])
    assert "load.rate=-1.0: must be" in capsys.readouterr().err


def made(load: dict[str, Any], **values: Any) -> Scenario:
    return scenario_of({"pool": POOLS, "load": load} | values)


def test_a_trace_is_replayed_in_copies(tmp_path: Path) -> None:
    rows = [{"timestamp": 1000 * n, "input_length": 700, "output_length": 5, "hash_ids": [7, n]} for n in range(3)]
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    requests = requests_of(made({"trace": str(file), "copies": 2, "speedup": 2.0}))
    assert [request.arrival_s for request in requests] == [0.0, 0.0, 0.5, 0.5, 1.0, 1.0]
    heads = [request.content.digest(0, 512) for request in requests]
    assert len(set(heads)) == 2 and heads[0] == heads[2] != heads[1]
    assert len(requests_of(made({"trace": str(file)}, duration_s=1.5))) == 2


def test_the_rate_changes_in_steps() -> None:
    requests = requests_of(made({"rates": [[0.0, 10.0], [50.0, 0.0], [80.0, 40.0]]}, duration_s=100.0))
    counts = [sum(begin <= r.arrival_s < end for r in requests) for begin, end in ((0, 50), (50, 80), (80, 100))]
    assert counts[1] == 0
    assert counts[0] == pytest.approx(500, rel=0.2) and counts[2] == pytest.approx(800, rel=0.2)


def test_parts_come_in_turn_and_again() -> None:
    """Each part has its own chance: without the other its requests are the same."""
    long = {"rate": 8.0, "input_len": "300-400", "output_len": "7", "end_s": 10.0}
    short = {"rate": 16.0, "input_len": "20", "output_len": "90", "begin_s": 10.0, "shared_prefix_len": 16}
    load = {"parts": [long, short], "period_s": 20.0}
    requests = requests_of(made(load, duration_s=80.0))
    assert [request.arrival_s for request in requests] == sorted(request.arrival_s for request in requests)
    assert [request.number for request in requests] == list(range(len(requests)))
    for request in requests:
        assert request.part == int(request.arrival_s % 20.0 > 10.0)
        assert request.output_len == (7, 90)[request.part]
    counts = [sum(request.part == part for request in requests) for part in (0, 1)]
    assert counts == pytest.approx([320, 640], rel=0.2)
    alone = requests_of(made({"parts": [long], "period_s": 20.0}, duration_s=80.0))
    assert [one.arrival_s for one in alone] == [one.arrival_s for one in requests if not one.part]
    heads = {request.content.digest(0, 16) for request in requests if request.part}
    assert len(heads) == 1 and requests[0].content.digest(0, 16) not in heads


def test_the_scenario_of_a_thousand_workers_can_be_read() -> None:
    made = read_scenario(Path(__file__).parents[4] / "benchmarks/data/thousand.toml")
    assert sum(pool.count for pool in made.pool) == 1000
    assert not Path(made.load.trace).is_absolute()
