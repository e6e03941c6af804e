from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import host_step


def test_every_kind_has_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_step.sampler_module, "sample", host_step.sampler_module.sample)  # and back at the end
    out = tmp_path / "host.json"
    options = ["--sequences", "5", "--context", "100", "--steps", "3", "--output", str(out)]
    assert host_step.main(options) == 0
    found = json.loads(out.read_text())["ms"]
    assert [*found] == [*host_step.KINDS] and all(ms > 0 for ms in found.values())
