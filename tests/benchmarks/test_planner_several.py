"""Models under one budget in virtual time, beside equal parts of it."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.planner import several
from benchmarks.planner.several import MODELS, PERIOD_S, measure, peak

RATES = (4.0, 60.0)


def test_workers_go_to_the_model_that_peaks() -> None:
    one, parts = (measure(arm, 12.0, RATES, 400.0, 3) for arm in ("one budget", "equal parts"))
    assert one.most_wanted <= 12 and parts.most_wanted <= 12
    assert one.met > parts.met + 0.1
    assert one.worker_s > parts.worker_s, "a part that is idle helps nobody else"


def test_one_model_peaks_at_a_time() -> None:
    for at in range(0, int(PERIOD_S), 10):
        assert sum(peak(0.0, 1.0, number)(float(at)) for number in range(len(MODELS))) <= 1.0
    assert max(peak(4.0, 60.0, 2)(float(at)) for at in range(int(PERIOD_S))) == 60.0


def test_the_command_writes_each_arm(tmp_path: Path) -> None:
    file = tmp_path / "several.json"
    assert several.main(["--seconds", "70", "--output", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [row["arm"] for row in rows] == ["one budget", "equal parts", "no budget"]
    assert all(len(row["met_by_model"]) == len(MODELS) for row in rows)
