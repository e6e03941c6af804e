from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import speculation
from benchmarks.script import median_ratio

pytestmark = pytest.mark.e2e


def test_an_answer_in_one_piece_has_no_time_per_token() -> None:
    assert median_ratio([3.0, 4.0, 9.0], [1.0, 0.0, 3.0]) == 3.0
    assert median_ratio([0.0], [1.0]) == 0.0


def test_both_stacks_give_the_same_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "draft tokens.json"
    load = ["--repeats", "1", "--max-tokens", "8", "--in-flight", "7", "--threads", "1"]
    assert speculation.main(["--model", "tiny-random", "--quantization", "none", *load, "--output", str(out)]) == 0
    found = json.loads(out.read_text())
    assert {row["task"] for row in found["one_by_one"]} == {task.name for task in speculation.tasks()}
    assert all(row["same"] == row["answers"] == 2 for row in found["one_by_one"])
    assert [row["same"] for row in found["together"]] == [7]
    assert all(row["accepted"] <= row["drafted"] for row in found["one_by_one"])
    assert "same answers" in capsys.readouterr().out
