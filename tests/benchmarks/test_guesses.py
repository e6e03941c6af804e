from __future__ import annotations

import json
from pathlib import Path

import pytest

from diptych.benchmarks import guesses

pytestmark = pytest.mark.e2e


def test_both_stacks_give_the_same_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "guesses.json"
    load = ["--repeats", "1", "--max-tokens", "8", "--in-flight", "7", "--threads", "1"]
    assert guesses.main(["--model", "tiny-random", "--quantization", "none", *load, "--output", str(out)]) == 0
    found = json.loads(out.read_text())
    assert {row["task"] for row in found["one_by_one"]} == {task.name for task in guesses.tasks()}
    assert all(row["same"] == row["answers"] == 2 for row in found["one_by_one"])
    assert [row["same"] for row in found["together"]] == [7]
    assert sum(row["guessed"] for row in found["one_by_one"]) > 0
    assert "same answers" in capsys.readouterr().out
