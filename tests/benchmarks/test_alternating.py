"""The benchmark of changing roles: its phases, what it counts, and one short run."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.alternating.__main__ import Run, main, met_over_time, parse, phases
from benchmarks.alternating.first_work import covered_s, role_changes, summarised
from benchmarks.load.summary import OK, RequestRecord

GOALS_MS = (1000.0, 100.0)
BEGAN = 1_700_000_000.0


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


def logged(folder: Path, name: str, *lines: dict[str, object]) -> None:
    """A process's log of JSON lines; `at` is the second after `BEGAN`."""
    written = []
    for line in lines:
        at = datetime.fromtimestamp(BEGAN + float(str(line["at"])), UTC).isoformat(timespec="milliseconds")
        written.append(json.dumps({"time": at, **line}))
    (folder / f"{name}.log").write_text("no JSON\n" + "\n".join(written) + '\n{"time": "half')


def test_first_work_is_counted_from_the_order_less_the_time_in_which_no_prompt_waits(tmp_path: Path) -> None:
    def ordered(at: float, worker: str, role: str) -> dict[str, object]:
        former = "decode" if role == "prefill" else "prefill"
        return {"at": at, "message": f"worker {worker} (tcp://h:1) is to change from {former} to {role}: 9 requests/s"}

    def ready(at: float, role: str) -> dict[str, object]:
        return {"at": at, "message": f"is a {role} worker now: drained in 0.290 s, changed in 0.100 s"}

    def stepped(at: float, role: str) -> dict[str, object]:
        return {"at": at, "message": f"first step as a {role} worker", "step_s": 0.05}

    def request(came: float, ttft_ms: float) -> dict[str, object]:
        return {"at": came + 5, "message": "request", "total_ms": 5000.0, "ttft_ms": ttft_ms, "prompt": 4000}

    logged(
        tmp_path,
        "router",
        ordered(-1.0, "decode-0", "prefill"),  # while workers learned
        ordered(1.0, "decode-0", "prefill"),
        ordered(1.0, "decode-1", "prefill"),
        ordered(9.0, "decode-0", "decode"),
        ordered(20.0, "prefill-0", "decode"),
        request(1.0, 1250.0),  # waits until 1.45
        request(1.2, 1150.0),  # until 1.55
        request(5.0, 800.0),  # not at all
    )
    first = (ready(1.4, "prefill"), stepped(1.7, "prefill"))
    logged(tmp_path, "decode-0", *first, ready(9.4, "decode"), stepped(10.0, "decode"))
    logged(tmp_path, "decode-1", ready(1.4, "decode"))  # it went back
    logged(tmp_path, "prefill-0", ready(20.4, "decode"))
    there, back, home, idle = role_changes(tmp_path, BEGAN)
    assert (there.at_s, there.worker, there.role) == (1.0, "decode-0", "prefill")
    assert (there.drain_s, there.change_s, there.idle_s, there.wait_s, there.step_s) == (0.3, 0.1, 0.1, 0.15, 0.05)
    assert back.work_s is None and back.change_s == 0.0
    assert (home.idle_s, home.wait_s, home.work_s) == (0.0, 0.55, 1.0)
    assert idle.work_s is None and idle.change_s == 0.1
    found = summarised([there, back, home, idle])
    assert (found["num"], found["num_worked"]) == (4, 2)
    assert (found["while_work_waits_median_s"], found["while_work_waits_worst_s"]) == (0.8, 1.0)
    assert (found["in_all_median_s"], found["in_all_worst_s"]) == (0.85, 1.0)


def test_spans_that_overlap_cover_time_once() -> None:
    assert covered_s([(0.0, 2.0), (1.0, 1.5), (1.5, 3.0), (5.0, 9.0)], (1.0, 6.0)) == 3.0
    assert covered_s([], (1.0, 6.0)) == 0.0
