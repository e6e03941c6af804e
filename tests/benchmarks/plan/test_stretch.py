"""How much of a trace a plan simulates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.plan.candidate import Candidate, base_flags, scenario
from benchmarks.plan.stretch import TRACE_REQUESTS, Stretch

from .conftest import make_spec


def trace_of(path: Path, num: int) -> str:
    """A trace with a request each half second."""
    rows = ({"timestamp": 500 * number, "input_length": 600, "output_length": 20} for number in range(num))
    path.write_text("\n".join(json.dumps(row | {"hash_ids": [0, 1]}) for row in rows))
    return str(path)


def test_a_long_trace_is_planned_for_its_beginning(tmp_path: Path) -> None:
    path = trace_of(tmp_path / "long.jsonl", TRACE_REQUESTS + 300)
    found = Stretch.of(make_spec(duration_s=0.0, load={"rate": 0.0, "trace": path}))
    assert found.spec.duration_s == (TRACE_REQUESTS - 1) / 2
    assert "first 600 s" in found.note and "--duration-s 750 " in found.note


@pytest.mark.parametrize("seconds", [0.0, 100.0])
def test_a_short_trace_is_planned_for_whole(tmp_path: Path, seconds: float) -> None:
    path = trace_of(tmp_path / "short.jsonl", 40)
    found = Stretch.of(make_spec(duration_s=seconds, load={"rate": 0.0, "trace": path}))
    assert (found.spec.duration_s, found.note) == (0.0, "")


def test_a_given_duration_stays(tmp_path: Path) -> None:
    path = trace_of(tmp_path / "short.jsonl", 40)
    assert Stretch.of(make_spec(duration_s=7.0, load={"rate": 0.0, "trace": path})).spec.duration_s == 7.0
    assert Stretch.of(make_spec(duration_s=9.0)).spec.duration_s == 9.0


def test_requests_that_come_far_apart_arrive_for_two_hours_at_most() -> None:
    def duration_s(arrivals_s: float, load_factor: float) -> float:
        spec = make_spec(duration_s=arrivals_s)
        return scenario(
            spec, Candidate(1, 1, base_flags(spec)), 1, load_factor=load_factor, goals=spec.goals
        ).duration_s

    assert duration_s(60.0, 1 / 32) == 1920.0, "a short load is simulated whole"
    assert duration_s(3600.0, 1 / 32) == 14_400.0
    assert duration_s(3600.0, 2.0) == 1800.0
