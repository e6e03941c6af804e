from __future__ import annotations

from typing import Any

import pytest

from common.config import DecodeWorkerConfig, PrefillWorkerConfig, WorkerConfig
from common.engine.worker import command
from common.engine.worker.command import run_role
from common.wire import Role

OFFERS: list[tuple[Role, WorkerConfig]] = []
PREPARED: list[WorkerConfig] = []


def pretended_offer(role: Role, config: WorkerConfig) -> Any:
    OFFERS.append((role, config))


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_with_vllm_has_the_offer_of_vllm(role: Role, monkeypatch: pytest.MonkeyPatch) -> None:
    OFFERS.clear()
    PREPARED.clear()
    names = {command.VLLM_OFFER: pretended_offer, command.VLLM_ENVIRONMENT: PREPARED.append}
    monkeypatch.setattr(command, "resolve_name", names.__getitem__)
    monkeypatch.setattr(command, "setup_logging", lambda *_, **__: None)
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")  # otherwise another variable is set
    monkeypatch.setattr("common.engine.worker.process.run_worker", lambda build: build() or 0)
    monkeypatch.setattr("common.config.vllm.version", lambda name: "0.32.0")
    build: Any = lambda home, other: None  # noqa: E731
    assert run_role(role, ["--engine", "vllm", "--device", "cpu", "--", "--seed", "1"], build) == 0
    ((offered, config),) = OFFERS
    cls = PrefillWorkerConfig if role == "prefill" else DecodeWorkerConfig
    assert (offered, type(config), config.engine_args) == (role, cls, ("--seed", "1"))
    assert [config] == PREPARED
