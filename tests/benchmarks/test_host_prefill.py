from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import host_prefill


def test_every_length_has_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = host_prefill.sampler_module
    monkeypatch.setattr(sampler, "sample", sampler.sample)  # and back at the end
    monkeypatch.setattr(host_prefill, "STEP", 512)
    out = tmp_path / "host.json"
    assert host_prefill.main(["--lengths", "64", "512", "--steps", "3", "--output", str(out)]) == 0
    found = json.loads(out.read_text())["ms"]
    assert [*found] == ["8 x 64", "1 x 512"] and all(ms > 0 for ms in found.values())
