"""What metrics and log say of the knobs."""

from __future__ import annotations

import logging

import pytest

from common.engine.sequences.engine import LOG_INTERVAL_S, KnobLog
from common.engine.sequences.step_budget import Knob
from common.engine.worker.contract import EngineStatus
from common.engine.worker.metrics import WorkerMetrics


@pytest.fixture
def metrics() -> WorkerMetrics:
    return WorkerMetrics("m", "w", EngineStatus)


def sample(metrics: WorkerMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, {"model_name": "m", "engine": "w", **labels})


def test_metrics_have_values_and_new_reasons(metrics: WorkerMetrics) -> None:
    knobs = KnobLog(metrics)
    for value, reason in ((64, "bound"), (20, "goal"), (21, "goal"), (21, "goal"), (64, "bound")):
        knobs.note("batch_cap", Knob(value, reason), 0.0)  # type: ignore[arg-type]
    assert sample(metrics, "diptych_knob", knob="batch_cap") == 64
    changes = {
        reason: sample(metrics, "diptych_knob_changes_total", knob="batch_cap", reason=reason)
        for reason in ("bound", "goal")
    }
    assert changes == {"bound": 2, "goal": 1}


def test_a_knob_that_turns_often_is_logged_seldom(metrics: WorkerMetrics, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    knobs = KnobLog(metrics)
    knobs.note("batch_cap", Knob(64, "bound"), 100.0)
    for turn in range(1, 100):
        knobs.note("batch_cap", Knob(20 + turn, "goal"), 100.0 + turn * LOG_INTERVAL_S / 80)
    assert [record.getMessage() for record in caplog.records] == [
        "batch_cap changed from 64 (bound) to 21 (goal)",
        "batch_cap changed from 21 (goal) to 101 (goal)",
    ]


def test_small_changes_are_not_logged(metrics: WorkerMetrics, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    knobs = KnobLog(metrics)
    for turn in range(10):
        knobs.note("step_tokens", Knob(100 + turn, "goal"), turn * 2 * LOG_INTERVAL_S)
    assert not caplog.records
