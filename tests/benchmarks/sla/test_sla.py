"""The command of `make sla`: what it refuses, and what a failing step reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.sla import __main__ as sla


def drawn_and_shown(step: Any, numbers: Any, folder: Path) -> str:
    """What a step prints of numbers that went through JSON."""
    numbers = json.loads(json.dumps(numbers))
    console = Console(width=200, record=True, quiet=False, file=(folder / "out").open("w"))
    step.show(console, numbers)
    step.draw(numbers, folder / "p.png", "title")
    assert (folder / "p.png").read_bytes().startswith(b"\x89PNG")
    console.file.close()
    return console.export_text()


def test_a_trace_that_is_missing_fails_its_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sla.main(["--only", "policies", "--traces", str(tmp_path), "--results", str(tmp_path)]) == 1
    assert "azure2023_conv.csv.gz" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--only", "everything"], ["--repeats", "0"], ["--begin", "1"]])
def test_bad_options_are_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        sla.main(flags)
    assert ended.value.code == 2 and flags[0] in capsys.readouterr().err
