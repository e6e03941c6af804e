"""What a heartbeat says while one long step runs."""

from __future__ import annotations

from common.worker.engine import EngineStatus


def test_prompts_that_a_long_step_computes_become_less_between_two_snapshots() -> None:
    status = EngineStatus(waiting_s=3.0, at=100.0)
    assert status.waiting_left_s(100.0) == 3.0
    assert status.waiting_left_s(102.0) == 1.0
    assert status.waiting_left_s(110.0) == 0.0
    assert status.waiting_left_s(99.0) == 3.0, "no clock goes back, but a reader may be a moment early"
