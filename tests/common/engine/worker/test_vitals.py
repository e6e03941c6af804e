"""What a worker says in its hello, and in a heartbeat while one long step runs."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from common.config import DecodeWorkerConfig
from common.engine.worker.contract import EngineStatus, ModelFacts
from common.engine.worker.vitals import WorkerIdentity, hello_of


def test_prompts_that_a_long_step_computes_become_less_between_two_snapshots() -> None:
    status = EngineStatus(waiting_s=3.0, at=100.0)
    assert status.waiting_left_s(100.0) == 3.0
    assert status.waiting_left_s(102.0) == 1.0
    assert status.waiting_left_s(110.0) == 0.0
    assert status.waiting_left_s(99.0) == 3.0, "no clock goes back, but a reader may be a moment early"


def test_a_router_is_told_of_as_many_rows_as_the_cache_has_room_for() -> None:
    """Before the model is loaded, of the bound."""
    identity, config = WorkerIdentity.create("decode", "d"), DecodeWorkerConfig(device="cuda")
    facts = ModelFacts(
        model_id="m", fingerprint="f", weights="w", max_model_len=1000, block_size=64, num_blocks=100, block_bytes=1,
        precision="float32", kv_dtype="float32",
    )  # fmt: skip
    assert hello_of(identity, config, None, "", "").max_num_seqs == 256
    assert hello_of(identity, config, facts, "", "").max_num_seqs == 12
    own = hello_of(identity, config, replace(facts, max_num_seqs=7, max_step_tokens=9), "", "")
    assert (own.max_num_seqs, own.max_step_tokens) == (7, 9), "an engine with limits of its own"
    assert own.hands_over and not hello_of(identity, config, replace(facts, hands_over=False), "", "").hands_over


def test_as_many_steps_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    from common.engine.run import loaded

    made = dict[str, Any]()
    monkeypatch.setattr(loaded, "records_steps", lambda config, device: True)
    monkeypatch.setattr(loaded, "recorder_for", lambda device: None)
    monkeypatch.setattr(loaded, "GraphRunner", lambda *parts, **sizes: made.update(sizes))
    kv: Any = SimpleNamespace(num_blocks=100, block_size=64, device=None)
    model: Any = SimpleNamespace(config=SimpleNamespace(max_model_len=1000))
    loaded.decode_graphs(model, kv, DecodeWorkerConfig(device="cuda"))
    assert made["max_num_seqs"] == 12
