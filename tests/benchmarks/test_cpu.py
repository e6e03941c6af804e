from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import cpu
from common.model_files.tiny import make_tiny_model
from kernels.cpu.backend import native_backend

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("quantization", "kv_dtype"), [("none", "auto"), ("int8", "int8"), ("none", "fp8")])
def test_every_operation_has_its_time(
    tmp_path: Path,
    quantization: str,
    kv_dtype: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if native_backend() is None:
        pytest.skip("no C++ compiler here")
    monkeypatch.setattr(cpu, "LOADS", (cpu.Load("decode", 3, 1, 20), cpu.Load("prefill", 1, 24, 0)))
    folder, out = make_tiny_model(tmp_path / "model"), tmp_path / "cpu.json"
    arguments = ["--model", str(folder), "--rounds", "3", "--quantization", quantization, "--output", str(out)]
    assert cpu.main([*arguments, "--dtype", "float32", "--kv-cache-dtype", kv_dtype]) == 0
    result = json.loads(out.read_text())
    assert min(result["rates"].values()) > 0
    for load in result["results"]:
        names = {part["name"].split()[0] for part in load["parts"]}
        assert {"embed", "norm", "linear", "rotate", "attend", "select"} <= names
        assert ("quantise" in names) == (quantization == "int8")
        assert 0 < sum(part["ms"] for part in load["parts"]) <= load["step_ms"] * 1.5
        assert all(part["floor_ms"] > 0 for part in load["parts"] if part["name"].startswith(("linear", "attend")))
    assert "times the floor" in capsys.readouterr().out
