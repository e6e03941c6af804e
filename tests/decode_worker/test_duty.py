"""One model, decoded and prefilled by one duty after the other: the same tokens, and no block is left owned."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq

from common.config import DecodeWorkerConfig, PrefillWorkerConfig
from common.config.decode_worker import SEQ_TOKENS
from common.engine.kv.cuda_driver import driver
from common.engine.models.batch import SequenceChunk
from common.engine.run.loaded import LoadedModel
from common.engine.worker.contract import DutyOffer, EngineStatus, WorkerParts
from common.engine.worker.loop_model import LoopModel
from common.engine.worker.metrics import WorkerMetrics
from common.engine.worker.vitals import WorkerIdentity
from common.errors import ConfigError, ModelError
from common.grammar.grammars import Grammars
from common.model_files.resolve import resolve_model
from common.wire.message_fields import pack_tokens
from common.wire.messages import DecodeRequest, Message, PrefillRequest
from common.wire.sampling_params import SamplingParams
from decode_worker.drafting.row_costs import RowCosts
from decode_worker.duty import decode_offer
from prefill_worker.duty import prefill_offer

from ..engine_rig import RouterSide, prompt
from ..waiting import wait_until

NUM_TOKENS = 12


class Free(RowCosts):
    """Of steps that cost nothing."""

    def seconds(self, num_rows: int) -> float:
        return 0.0


@pytest.fixture(scope="module")
def model() -> Iterator[LoopModel]:
    config = DecodeWorkerConfig(model="tiny-random", kv_memory_gib=0.01, threads=1, dtype="float32")
    loaded = LoopModel.load(resolve_model("tiny-random"), config)
    yield loaded
    loaded.close()


class Term(RouterSide):
    """A duty whose engine turns by itself."""

    def __init__(self, offer: DutyOffer[LoopModel], epoch: int, model: LoopModel) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        identity = WorkerIdentity("w", offer.role, "decode", epoch)
        metrics = WorkerMetrics("m", "w", EngineStatus, role=offer.role)
        self.duty = offer.begin(WorkerParts(identity, self.context, None, metrics))
        self.sent = []
        self.duty.bind()
        self.engine: Any = self.duty.build_engine(model, self.sent.extend)
        self.engine.start()

    def answer(self, request: Message) -> list[int]:
        self.tell(request)
        wait_until(lambda: any(delta.finish_reason for delta in self.deltas()) or self.failures())
        assert not self.failures()
        return [token for delta in self.deltas() for token in delta.token_ids]

    def end(self) -> None:
        wait_until(lambda: self.engine.is_empty)
        assert self.engine.stop()
        assert self.engine.check_integrity().owned == 0
        self.context.term()


def test_roles_follow_each_other_over_one_model(model: LoopModel) -> None:
    tokens = prompt(100)
    common: dict[str, Any] = {"request_id": "a", "attempt": 0, "prompt": pack_tokens(tokens)}
    long, short = (SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in (NUM_TOKENS, 1))
    decode, prefill = decode_offer(DecodeWorkerConfig()), prefill_offer(PrefillWorkerConfig())
    answers = []
    for epoch, (offer, request) in enumerate(
        (
            (decode, DecodeRequest(params=long, **common)),
            (prefill, PrefillRequest(params=short, **common)),
            (decode, DecodeRequest(params=long, **common)),
        )
    ):
        term = Term(offer, epoch, model)
        answers.append(term.answer(request))
        term.end()
    assert len(answers[0]) == NUM_TOKENS
    assert answers[1] == answers[0][:1] and answers[2] == answers[0]


def test_a_gpu_decodes_as_many_rows_as_its_cache_has_room_for(model: LoopModel) -> None:
    kv = model.loaded.kv
    term = Term(decode_offer(DecodeWorkerConfig(device="cuda")), 1, model)
    assert term.engine.scheduler.max_num_seqs == kv.num_blocks * kv.block_size // SEQ_TOKENS < 256
    term.end()


def test_a_draft_model_decodes_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here it is the model itself, whose steps seem to cost nothing."""
    monkeypatch.setattr("decode_worker.drafting.row_costs.RowCosts.seconds", lambda costs, num_rows: 1.0)
    monkeypatch.setattr("decode_worker.drafting.drafter.RowCosts", Free)
    files = resolve_model("tiny-random")
    settings: dict[str, Any] = {"model": "tiny-random", "kv_memory_gib": 0.01, "threads": 1, "dtype": "float32"}
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, seed=2, ignore_eos=True)
    request = DecodeRequest(request_id="a", attempt=0, prompt=pack_tokens(prompt(100)), params=params)
    answers = []
    for epoch, draft in enumerate(("", "tiny-random")):
        config = DecodeWorkerConfig(**settings, draft_model=draft, draft_quantization="none")
        model = LoopModel.load(files, config)
        term = Term(decode_offer(config), epoch, model)
        answers.append(term.answer(request))
        timeline = term.deltas()[-1].timeline
        assert timeline is not None and bool(sum(timeline.accepted_places)) == bool(draft)
        assert bool(draft) == bool(term.engine.status.draft_blocks.total)
        term.end()
        model.close()
    assert answers[0] == answers[1]


def test_grammars_are_closed_by_their_last_user(model: LoopModel, monkeypatch: pytest.MonkeyPatch) -> None:
    made, closed = Grammars(model.files, model.loaded.vocab_size), list[bool]()
    monkeypatch.setattr(made._checks, "close", lambda: closed.append(True))
    first, second = made.shared(), made.shared()
    for user in (first, second):
        user.close()
        assert not closed
    made.close()
    assert closed


def test_a_model_that_embeds_has_nothing_to_decode() -> None:
    config = DecodeWorkerConfig(model="tiny-random", kv_memory_gib=0.01, task="embed")
    with pytest.raises(ModelError, match="tiny-random is served to embed, which only prefill workers do"):
        LoadedModel.load(resolve_model("tiny-random"), config)


def test_a_model_that_embeds_is_loaded_without_its_head() -> None:
    config = PrefillWorkerConfig(model="tiny-random", kv_memory_gib=0.01, threads=1, dtype="float32", task="embed")
    loaded = LoadedModel.load(resolve_model("tiny-random"), config)
    assert (loaded.task.pooling, loaded.task.width, loaded.score) == ("last", 64, None)
    rows = loaded.runner.forward([SequenceChunk((1, 2, 3), 0, (0,), all_logits=True)])
    assert rows.shape == (3, 64) and rows.dtype == torch.float32


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_an_engine_that_cannot_lend_blocks_leaves_nothing_open(
    model: LoopModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, role: str
) -> None:
    """A role change that fails returns to the previous role, which needs the same ports and file."""
    monkeypatch.setattr("common.engine.worker.duty.LendableBlocks", lambda *arguments: 1 / 0)
    settings: dict[str, Any] = {"kv_disk_path": str(tmp_path / "blocks"), "kv_disk_gib": 0.01}
    offer = (
        decode_offer(DecodeWorkerConfig(**settings))
        if role == "decode"
        else prefill_offer(PrefillWorkerConfig(**settings))
    )
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    metrics = WorkerMetrics("m", "w", EngineStatus, role=role)
    duty: Any = offer.begin(WorkerParts(WorkerIdentity("w", role, role, 1), context, None, metrics))
    duty.bind()
    with pytest.raises(ZeroDivisionError):
        duty.build_engine(model, lambda messages: None)
    duty.close_kv()
    assert duty._tiers._num_running == 0 and duty._puller._commands.socket.closed
    assert duty._sender._commands.socket.closed
    assert role == "prefill" or duty._receiver._socket.closed
    context.destroy(linger=0)


TRANSPORTS = [
    (config(kv_transport=transport, device=device), says)
    for transport, device, says in (
        ("nixl", "cpu", r"pip install 'diptych\[nixl\]'"),
        ("cuda-ipc", "cuda", "cannot load the CUDA driver"),
    )
    for config in (DecodeWorkerConfig, PrefillWorkerConfig)
]


@pytest.mark.parametrize(("config", "says"), TRANSPORTS)
def test_a_worker_refuses_a_transport_that_it_lacks(
    config: DecodeWorkerConfig | PrefillWorkerConfig, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it binds a socket, and long before it reads weights."""
    monkeypatch.setitem(sys.modules, "nixl", None)
    monkeypatch.setattr("common.engine.kv.cuda_driver.LIBRARY", "libcuda-of-nobody.so")
    driver.cache_clear()
    offer: DutyOffer[LoopModel] = (
        decode_offer(config) if isinstance(config, DecodeWorkerConfig) else prefill_offer(config)
    )
    identity = WorkerIdentity("w", offer.role, "decode", 1)
    metrics = WorkerMetrics("m", "w", EngineStatus, role=offer.role)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    duty = offer.begin(WorkerParts(identity, context, None, metrics))
    with pytest.raises(ConfigError, match=says) as refused:
        duty.bind()
    assert refused.value.field == "kv_transport" and refused.value.allowed.startswith("auto, tcp or shm")
    duty.close_kv()
    context.term()
