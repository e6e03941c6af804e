"""The benchmark of changing roles: its phases, what it counts, and one short run."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.alternating.__main__ import Run, main, met_over_time, parse, phases
from benchmarks.load.summary import OK, RequestRecord

GOALS_MS = (1000.0, 100.0)


def record(start: float, ttft_s: float, outcome: str = OK) -> RequestRecord:
    found = RequestRecord(0, start=start, outcome=outcome, output_tokens=3)
    if outcome == OK:
        found.token_times = [start + ttft_s + 0.05 * number for number in range(3)]
    return found


def test_phases_take_turns_and_follow_each_other() -> None:
    order = phases(parse(["--phases", "3", "--phase-s", "20"]))
    assert [phase.name for phase in order] == ["long prompts", "long answers", "long prompts"]
    assert [phase.begins_s for phase in order] == [0.0, 20.0, 40.0]
    assert order[0].input_len > order[1].input_len and order[0].output_len < order[1].output_len


def test_goodput_counts_what_met_both_goals_over_the_time_of_arrivals() -> None:
    run = Run(
        [[record(0.0, 0.5), record(1.0, 1.5)], [record(10.0, 0.2, "http 429"), record(11.0, 0.2)]], 20.0, GOALS_MS
    )
    row = run.row()
    assert run.goodput() == 2 / 20.0
    assert (row["met"], row["met_by_phase"], row["refused"], row["failed"]) == (0.5, [0.5, 0.5], 1, 0)


def test_the_time_line_leaves_out_windows_without_requests() -> None:
    run = Run([[record(5.0, 0.5), record(6.0, 1.5)], [record(25.5, 0.2)]], 40.0, GOALS_MS)
    assert met_over_time(run, 10.0) == ([5.0, 25.0], [0.5, 1.0])


def test_a_short_run_measures_each_phase_and_sees_all_workers(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    flags = ("--phases", "2", "--phase-s", "2", "--prompt-len", "200", "--answer-len", "8", "--splits", "changing")
    assert main([*flags, "--output", str(file), "--plot", str(tmp_path / "plot.png")]) == 0
    (run,) = json.loads(file.read_bytes())["runs"]["changing"]
    assert run["failed"] == 0 and run["ttft_p50_ms"] > 0
    assert all(prefill + decode == 4 for _, prefill, decode in run["workers"])
    assert (tmp_path / "plot.png").stat().st_size > 1000
