"""`--only policies` of `make sla`: its loads, the systems that it compares, the bound, and its numbers."""

from __future__ import annotations

import gzip
import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.load.trace import TraceRow, read_trace
from benchmarks.simulator.simulation import Simulation
from benchmarks.sla import loads, policies, systems
from benchmarks.sla.most_good import most_good
from benchmarks.sla.step import Settings, Skipped

NAMES = [*(system.name for system in systems.SYSTEMS), policies.BOUND]


def run_of(system: str, repeat: int, goodput: float) -> dict[str, Any]:
    return {"load": "a", "system": system, "repeat": repeat, "share": 1.0, "rate": 9.0, "goodput": goodput}


def test_ratios_are_taken_within_a_repeat() -> None:
    """The best rival of each repeat counts: here round robin once, random twice."""
    goodputs = {
        "ours": (6.0, 8.0, 9.0),
        "choice: random": (3.0, 4.0, 6.0),
        "choice: round-robin": (5.0, 2.0, 2.0),
        "whole: one pool": (2.0, 2.0, 3.0),
        "bound": (9.0, 9.0, 9.0),
    }
    runs = [run_of(name, repeat, goodputs.get(name, (1.0, 1.0, 3.0))[repeat]) for repeat in range(3) for name in NAMES]
    (row,) = policies.summarised(runs)
    assert row["to"]["choices"] == pytest.approx(1.5)  # of 1.2, 2.0 and 1.5
    assert row["range"]["choices"] == [1.2, 2.0]
    assert row["to"]["wholes"] == pytest.approx(3.0) and row["best"]["wholes"] == "whole: one pool"
    assert row["to"]["bound"] == pytest.approx(0.889)
    assert row["bound_to"]["choices"] == pytest.approx(1.8)
    said = policies.verdicts([row])
    assert said[0] == "at least 1.3 times the best of choices: 1 of 1 cases; the bound allows it in 1"
    assert said[3] == "below 0.97 times the best of choices: 0 cases"


def test_slices_do_not_overlap_and_begin_at_zero() -> None:
    load = loads.log_normal("x", 3, (100, 0.5), (50, 0.5), num=100)
    first, second = (load.slice(number, 30) for number in (0, 1))
    assert first[0].arrival_s == second[0].arrival_s == 0.0
    assert [row.input_len for row in first] == [row.input_len for row in load.rows[:30]]
    assert [row.input_len for row in second] == [row.input_len for row in load.rows[30:60]]
    assert len(load.slice(7, 30)) == 30


def test_a_slice_is_written_as_a_trace(tmp_path: Path) -> None:
    rows = loads.conversations(2, num=40).slice(0, 40)
    loads.write_trace(tmp_path / "t.jsonl", rows)
    again = read_trace(tmp_path / "t.jsonl")
    assert [(row.input_len, row.output_len, row.block_ids) for row in again] == [
        (row.input_len, row.output_len, row.block_ids) for row in rows
    ]
    assert any(set(one.block_ids) & set(other.block_ids) for one in rows[:5] for other in rows[5:])


def test_what_an_earlier_prompt_has_is_not_computed_again() -> None:
    rows = [TraceRow(0.0, 1100, 9, (1, 2)), TraceRow(1.0, 1600, 9, (1, 2, 3)), TraceRow(2.0, 1024, 9, (1, 2))]
    assert loads.uncached_lens(rows) == [1100, 576, 1]


def test_capacity_is_that_of_all_workers_or_of_full_batches() -> None:
    prompts = loads.log_normal("long prompts", 1, (4000, 0.1), (10, 0.1), num=50)
    answers = loads.log_normal("long answers", 1, (50, 0.1), (900, 0.1), num=50, most_rows=16)
    prompt_s = loads.PREFILL.token_s * 4000
    assert 3 / (1.5 * prompt_s) < loads.rate_served(prompts.rows, prompts) < 6 / prompt_s
    step_s = loads.DECODE.fixed_s + loads.DECODE.floor_s
    assert loads.rate_served(answers.rows, answers) == pytest.approx(3 * 16 / (900 * step_s), rel=0.2)


def runs_of(tmp_path: Path, system: systems.System) -> tuple[Simulation, Any]:
    """Thirty requests that come faster than one prefill worker computes them."""
    load = loads.log_normal("x", 5, (1500, 0.6), (12, 0.5), num=30, num_prefill=1, num_decode=1)
    loads.write_trace(tmp_path / "t.jsonl", load.rows)
    simulation = Simulation(systems.scenario(load, tmp_path / "t.jsonl", system, 25.0, 1, in_flight=20))
    return simulation, simulation.run()


def test_a_plain_system_predicts_nothing_and_keeps_the_order(tmp_path: Path) -> None:
    simulation, run = runs_of(tmp_path, systems.WHOLES[0])
    ended = [request for request in run.requests if request.outcome == "ok"]
    firsts = [request.first_token_at for request in ended]
    assert firsts == sorted(firsts)  # one prefill worker: first come, first served
    assert {request.outcome for request in run.requests} == {"ok", "Unavailable"}  # for the bound, not for a goal
    assert set(run.num_choices) == {"remote"}
    workers = simulation.routers[0].registry.workers.values()
    assert all(worker.load.beat is not None and not worker.load.beat.step_model.is_known for worker in workers)


def test_ours_refuses_by_prediction_and_lets_short_prompts_pass(tmp_path: Path) -> None:
    _, run = runs_of(tmp_path, systems.OURS)
    ended = [request for request in run.requests if request.outcome == "ok"]
    assert {request.outcome for request in run.requests} <= {"ok", "Overloaded"}
    assert sum(request.meets(500.0, 25.0) for request in ended) > 0.75 * len(ended)


@pytest.mark.parametrize("system", systems.SYSTEMS, ids=lambda system: system.name)
def test_a_system_has_as_many_workers_as_the_others(system: systems.System) -> None:
    load = loads.log_normal("x", 1, (100, 0.5), (20, 0.5), num=20, num_slow=1)
    pools = systems.scenario(load, Path("t"), system, 1.0, 0, in_flight=9).pool
    assert sum(pool.count for pool in pools) == 6
    (slow,) = [pool for pool in pools if pool.name == "slow"]
    assert slow.count == 1 and slow.coefficients.token_s == 2 * loads.PREFILL.token_s
    assert {pool.role for pool in pools} == ({"decode"} if system.is_pooled else {"prefill", "decode"})


def test_the_bound_is_the_most_that_any_selection_allows() -> None:
    """Compared with every selection of few prompts, served as they come."""
    chance = random.Random(4)
    for _ in range(60):
        arrivals = sorted(chance.uniform(0.0, 1.0) for _ in range(8))
        prompts = [chance.choice([0.05, 0.1, 0.3, 0.7]) for _ in arrivals]
        most = max(
            sum(chosen)
            for chosen in itertools.product((0, 1), repeat=8)
            if all_in_time(
                [pair for pair, take in zip(zip(arrivals, prompts, strict=True), chosen, strict=True) if take]
            )
        )
        assert most_good(arrivals, prompts, 0.4, 2.0) == most


def all_in_time(jobs: list[tuple[float, float]]) -> bool:
    end = 0.0
    for at, seconds in jobs:
        end = max(end, at) + seconds / 2.0
        if seconds > 0.4 or end > at + 0.4:
            return False
    return True


@pytest.mark.slow
def test_policies_are_simulated_shown_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = loads.log_normal("code", 1, (900, 0.5), (20, 0.5), num=60)
    monkeypatch.setattr(loads, "loads", lambda settings: iter([load]))
    monkeypatch.setattr(policies, "SHARES", (1.0,))
    told: list[str] = []
    numbers = policies.measure(Settings(repeats=1, num_requests=20), told.append)
    assert told == ["code, repeat 1 of 1"]
    assert [run["system"] for run in numbers["runs"]] == [name for name in NAMES if not name.endswith("prefix-only")]
    assert all(0.0 < run["met"] <= 1.0 for run in numbers["runs"])
    (row,) = numbers["summary"]
    assert all(goodput <= row["goodput"]["bound"] for goodput in row["goodput"].values())
    numbers = json.loads(json.dumps(numbers))
    with (tmp_path / "out").open("w") as out:
        console = Console(width=300, record=True, file=out)
        policies.STEP.show(console, numbers)
    assert "the bound allows it in" in console.export_text()
    policies.STEP.draw(numbers, tmp_path / "p.png", "title")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_loads_without_traces_have_requests() -> None:
    found = list(loads.loads(Settings()))
    assert len({load.name for load in found}) == len(found) == 7
    assert all(loads.rate_served(load.slice(0, 40), load) > 0 for load in found)


def test_loads_that_are_not_asked_for_are_left_out() -> None:
    with pytest.raises(Skipped, match="no load has one of nonsense"):
        policies.measure(Settings(cases=("nonsense",)), lambda words: None)


def test_traces_are_read_behind_the_part_that_is_left_out(tmp_path: Path) -> None:
    rows = [TraceRow(float(number), 10 + number, 5) for number in range(100)]
    for name in ("azure2023_conv.csv.gz", "azure2023_code.csv.gz", "mooncake_conversation.jsonl.gz"):
        loads.write_trace(tmp_path / "plain", rows)
        (tmp_path / name).write_bytes(gzip.compress((tmp_path / "plain").read_bytes()))
    found = list(itertools.islice(loads.loads(Settings(traces=tmp_path, begin=0.5)), 3))
    assert [load.rows[0].input_len for load in found] == [60, 60, 60]
