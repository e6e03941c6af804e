from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import sampling
from kernels.cpu.backend import native_backend


def test_every_kind_has_its_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if native_backend() is None:
        pytest.skip("no C++ compiler here")
    out = tmp_path / "sampling.json"
    assert sampling.main(["--model", "tiny-random", "--batch", "3", "--rounds", "2", "--output", str(out)]) == 0
    found = json.loads(out.read_text())
    assert [result["kind"] for result in found["results"]] == [*sampling.KINDS]
    assert all(result["ms"] > 0 for result in found["results"]) and found["floor_ms"] > 0
    assert "times the floor" in capsys.readouterr().out
