"""The benchmark of pulls over whole systems, in short."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.paced import pulls


@pytest.mark.e2e
def test_a_short_run_tells_where_tokens_came_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "pulls.json"
    load = ["--prefix", "512", "--bursts", "2", "--repeats", "1", "--tokens-per-s", "1000", "--kv-bytes", "1024"]
    assert pulls.main([*load, "--kv-memory-gib", "0.1", "--output", str(out)]) == 0
    (pulling,), (alone,) = (json.loads(out.read_text())["rounds"][arm] for arm in (pulls.WITH, pulls.WITHOUT))
    assert pulling["peer"] > 0 and "peer" not in alone
    sources = ("memory", "peer", "computed")
    assert sum(pulling.get(name, 0) for name in sources) == sum(alone.get(name, 0) for name in sources)
    assert "TTFT of bursts" in capsys.readouterr().out
