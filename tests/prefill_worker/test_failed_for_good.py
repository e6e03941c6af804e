from __future__ import annotations

from typing import Any

from ..engine_rig import prompt

Rig = Any  # EngineRig of conftest, which test modules cannot import


def test_the_decode_worker_learns_that_no_other_try_can_help(engine: Rig) -> None:
    engine.ask(prompt(100), remote=True, temperature=1.0, logit_bias=((7, float("nan")),))
    engine.turn()
    engine.read_open()
    engine.until(lambda: engine.is_clean)
    assert [(failed.phase, failed.retryable) for failed in engine.failures()] == [("prefill", False)]
    assert engine.read_failed().phase == "prefill"
