"""Sleep of a worker with vLLM: its processes end, and the model is loaded again for the next run of the role."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from common.config import DecodeWorkerConfig
from common.engine.vllm import launch
from common.engine.vllm import model as model_module
from common.engine.vllm.duty import vllm_offer
from common.engine.worker import EngineStatus, WorkerMetrics, WorkerParts
from common.engine.worker.duties import Duties
from common.engine.worker.vitals import WorkerIdentity

from ....foreign_engine import Faults
from .pretended import PretendedVllm

CONTROL: Any = SimpleNamespace(send_threadsafe=lambda messages: None)


async def test_a_model_is_loaded_after_a_sleep_for_the_run_that_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ranks accept KV for the epoch in the hello, and its cached blocks are recorded where routers read them."""
    loads: list[tuple[WorkerParts, object]] = []
    models: list[PretendedVllm] = []
    ended: list[object] = []

    def load(files: object, config: object, parts: WorkerParts, block_log: object) -> PretendedVllm:
        loads.append((parts, block_log))
        models.append(PretendedVllm(Faults()))
        return models[-1]

    monkeypatch.setattr(model_module, "load_vllm", load)
    monkeypatch.setattr(launch, "process_tree", lambda: frozenset({1, 2}))
    monkeypatch.setattr(launch, "end_processes", ended.append)
    offer = vllm_offer("decode", DecodeWorkerConfig(engine="vllm"))
    metrics = WorkerMetrics("m", "d", EngineStatus, role="decode")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    files: Any = None
    duties = Duties(offer, None, context, None, metrics, WorkerIdentity.create("decode", "d"))
    duties.adopt(offer.load(files))
    duties.start(CONTROL)
    await duties.unload()
    assert ended == [{1, 2}] and not models[0].thread.loop.is_running() and duties.model is None
    await duties.reload(lambda: offer.load(files), CONTROL)
    epochs = [parts.identity.epoch for parts, _ in loads]
    assert epochs[0] < epochs[1] == duties.identity.epoch
    assert loads[1][1] is duties.block_log and duties.kv_address == PretendedVllm.kv_address
    duties.stop()
    context.term()


def test_a_worker_over_several_hosts_does_not_sleep() -> None:
    config = DecodeWorkerConfig(engine="vllm", tensor_parallel_size=2, rank_hosts=2, rank_port=7005)
    assert vllm_offer("decode", config).free is None
