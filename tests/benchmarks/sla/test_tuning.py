"""Knobs beside fixed flags: cases, recovery, the choice of the best setting; and what a stopped step keeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.simulator.simulation import Simulation
from benchmarks.sla import __main__ as sla
from benchmarks.sla import tuning
from benchmarks.sla.journal import Journal
from benchmarks.sla.policies import write_trace
from benchmarks.sla.step import Settings, Step
from benchmarks.sla.tuning_cases import END_S, EVENT_S, Case, Phase, Setting, cases

from .test_sla import drawn_and_shown

SHORT, LONG = ((200, 0.3), (12, 0.3)), ((3000, 0.2), (40, 0.2))


def good(*spans: tuple[float, float, bool]) -> list[tuple[float, bool]]:
    """A request each 100 ms of the spans, all of which met their goals or missed them."""
    return [
        (begin_s + number / 10, met) for begin_s, end_s, met in spans for number in range(round((end_s - begin_s) * 10))
    ]


def test_recovery_is_the_end_of_the_first_window_within_goals() -> None:
    late = good((0.0, EVENT_S, True), (EVENT_S, EVENT_S + 8.0, False), (EVENT_S + 8.0, END_S, True))
    assert tuning.recovery_s(good((0.0, END_S, True))) == tuning.WINDOW_S
    assert tuning.recovery_s(late) == pytest.approx(8.0 + tuning.WINDOW_S, abs=tuning.LOOK_S)
    assert tuning.recovery_s(good((0.0, EVENT_S, True), (EVENT_S, END_S, False))) is None
    assert tuning.share_of(late, 0.0, EVENT_S) == 1.0 and tuning.share_of(late, END_S, END_S + 1) is None


def run_of(num_good: int, recovery_s: float | None = 5.0) -> dict[str, Any]:
    return {"num": 100, "num_good": num_good, "recovery_s": recovery_s, "after": 0.9}


def test_the_best_fixed_setting_is_that_of_all_seeds() -> None:
    fixed = {"a": [run_of(99), run_of(50), run_of(50)], "b": [run_of(80, None), run_of(90, None), run_of(90)]}
    goals = [run_of(72, None), run_of(90, None), run_of(99, 12.0)]
    row = tuning.summarised({"case": "c", "goals": goals, "fixed": fixed})
    assert row["best"] == "b" and row["ratio"] == 1.0 and row["ratio_range"] == [0.9, 1.1]
    assert not row["feasible"] and row["recovery_s"] is None
    assert tuning.summarised({"case": "c", "goals": fixed["a"], "fixed": fixed})["feasible"]


def test_cases_change_at_the_event() -> None:
    case = Case("mix", Phase(0.5, ((100, 0.2), (20, 0.2))), Phase(0.5, ((3000, 0.2), (20, 0.2))))
    rows = case.rows(4)
    assert rows == case.rows(4) != case.rows(5)
    assert all((row.input_len < 1000) == (row.arrival_s < EVENT_S) for row in rows)
    assert max(row.arrival_s for row in rows) < END_S
    assert case.capacity(case.before) > case.capacity(case.after)
    named = cases(None)
    assert len({one.name for one in named}) == len(named) and all(len(one.settings()) >= 6 for one in named)


@pytest.mark.slow
def test_goals_turn_the_knobs_of_one_arm_only(tmp_path: Path) -> None:
    """A fixed worker keeps its flags; one with goals lets so many run, and computes so much, as keep them."""
    case = Case("tiny", Phase(0.15, SHORT), Phase(0.15, SHORT))
    write_trace(tmp_path / "t.jsonl", case.rows(1)[:60])
    seen = {}
    for fixed in (True, False):
        simulation = Simulation(case.scenario(tmp_path / "t.jsonl", 1, Setting(2048, 96, 256), fixed=fixed))
        simulation.run()
        seen[fixed] = {
            (knob.value, knob.reason) for w in simulation.workers.values() for knob in w.scheduler.knobs.values()
        }
    assert seen[True] == {(2048, "bound"), (96, "bound"), (256, "bound"), (32, "bound")}
    assert seen[False] != seen[True]


@pytest.mark.slow
def test_a_case_is_measured_shown_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("tiny", Phase(0.05, LONG), Phase(0.08, LONG), 1, 1)
    monkeypatch.setattr(tuning, "cases", lambda traces: [case])
    monkeypatch.setattr(Case, "settings", lambda self: [Setting(512, 64)])
    journal = Journal(tmp_path / "partial.jsonl")
    numbers = tuning.measure(Settings(repeats=2, journal=journal), lambda words: None)
    (row,) = numbers["summary"]
    assert row["feasible"] and row["recovery_s"] == tuning.WINDOW_S and row["ratio"] == pytest.approx(1.0, abs=0.05)
    assert len(journal) == 4, "one setting and goals, on two seeds"
    assert "1 of 1 that are feasible" in drawn_and_shown(tuning.STEP, numbers, tmp_path)


def test_cases_are_chosen_by_their_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--only", "tuning", "--results", str(tmp_path)]
    assert sla.main([*flags, "--cases", "no such", "neither"]) == 0
    assert "no case has one of no such, neither" in capsys.readouterr().out.replace("\n", " ")


def test_a_journal_keeps_what_was_measured_with_the_same_settings(tmp_path: Path) -> None:
    file = tmp_path / "new" / "x.partial.jsonl"
    first = Journal(file, "seed 1")
    assert first.once("a", lambda: [1, 2]) == first.once("a", lambda: 1 / 0) == [1, 2]
    first.once("b", lambda: {"c": 3.5})
    with file.open("a") as torn:
        torn.write('{"part": "d", "fou')
    again = Journal(file, "seed 1", resume=True)
    assert len(again) == 2 and again.once("b", lambda: 1 / 0) == {"c": 3.5}
    again.once("d", lambda: 4)
    assert len(Journal(file, "seed 1", resume=True)) == 3
    assert len(Journal(file, "seed 2", resume=True)) == len(Journal(file, "seed 1", resume=True)) == 0
    first.remove()
    assert not file.exists()


def test_a_stopped_step_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def measure(settings: Settings, tell: Any) -> dict[str, Any]:
        def part(number: int) -> int:
            asked.append(number)
            if asked.count(2) == 1 and number == 2:
                raise KeyboardInterrupt
            return number

        return {
            "parts": [settings.journal.once(f"{number}", lambda number=number: part(number)) for number in range(4)]
        }

    def draw(numbers: Any, path: Path, title: str) -> None:
        path.write_bytes(b"")

    step = Step("slow", "about", measure, lambda console, numbers: None, draw)
    monkeypatch.setattr(sla, "STEPS", (step,))
    flags = ["--only", "slow", "--results", str(tmp_path)]
    with pytest.raises(KeyboardInterrupt):
        sla.main(flags)
    assert sla.main([*flags, "--resume"]) == 0
    assert asked == [0, 1, 2, 2, 3]
    (result,) = tmp_path.glob("sla-slow-*.json")
    assert json.loads(result.read_text())["parts"] == [0, 1, 2, 3]
    assert not list(tmp_path.glob("*.partial.jsonl"))
