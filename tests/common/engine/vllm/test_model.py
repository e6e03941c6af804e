"""What a worker tells of a model that vLLM has loaded, and its adapters."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import signal
import struct
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zmq
from prometheus_client import REGISTRY, Counter, Gauge

from common.config import DecodeWorkerConfig, PrefillWorkerConfig
from common.engine.kv import BlockLog
from common.engine.vllm import model as model_module
from common.engine.vllm.adapters import VllmAdapters, describe_adapter
from common.engine.vllm.client import DraftCounter, Drafts, Output, pooled_output
from common.engine.vllm.launch import CoreFiles
from common.engine.vllm.layout import KVGroup
from common.engine.vllm.link import RankReady
from common.engine.vllm.model import (
    COMMON_SERIES,
    CoreThread,
    VllmCollector,
    VllmModel,
    advertised,
    check_drafts,
    connector_settings,
    facts_of,
    load_vllm,
)
from common.engine.worker import EngineStatus, WorkerMetrics, WorkerParts
from common.engine.worker.vitals import WorkerIdentity
from common.errors import ConfigError, ModelError
from common.machine import PrivateFolder
from common.model_files import GENERATES, ModelFiles

LAYOUT = (
    "dtype=float32 stages=1 full(block_size=128 heads=2 head_bytes=100) window(block_size=128 heads=2 head_bytes=50)"
)


def files() -> ModelFiles:
    return ModelFiles(
        model_id="m", format="hf", weights=(), tokenizer=Path("/t"), config=Path("/m/config.json"), eos_token_ids=(1,),
        max_model_len=64, vocab_size=9, weights_hash="0",
    )  # fmt: skip


def config(**model: Any) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(**{"dtype": "torch.bfloat16", "quantization": None, "max_model_len": 99} | model),
        cache_config=SimpleNamespace(cache_dtype="auto", block_size=128, num_gpu_blocks=7),
        scheduler_config=SimpleNamespace(max_num_seqs=5, max_num_batched_tokens=64),
        parallel_config=SimpleNamespace(world_size=2),
    )


def test_facts_are_those_of_vllm() -> None:
    facts = facts_of(files(), config(), "w", LAYOUT)
    assert (facts.max_model_len, facts.block_size, facts.num_blocks, facts.block_bytes) == (99, 128, 6, 300)
    assert (facts.max_num_seqs, facts.max_step_tokens, facts.changes_role) == (5, 64, False)
    assert not facts.hands_over, "a HandOver fails the request"
    assert facts.fingerprint != facts_of(files(), config(), "w", LAYOUT + " ").fingerprint
    assert facts.fingerprint != facts_of(files(), config(), "other", LAYOUT).fingerprint
    assert dict(facts.layout)["dtype"] == "bfloat16" and facts.resources == "2 ranks"


def test_a_start_that_failed_leaves_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ModelError("vLLM refuses the model")

    for name, replacement in (
        ("engine_config", refuse),
        ("prepare_files", lambda *_: None),
        ("process_tree", frozenset),
        ("served_task", lambda *_: GENERATES),
    ):
        monkeypatch.setattr(model_module, name, replacement)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    metrics = WorkerMetrics("m", "d", EngineStatus, role="decode")
    parts = WorkerParts(WorkerIdentity("d", "decode", "decode", 1), context, None, metrics)
    with pytest.raises(ModelError, match="refuses the model"):
        load_vllm(files(), DecodeWorkerConfig(engine="vllm", device="cpu"), parts, BlockLog(1))
    ending = threading.Thread(target=context.term, daemon=True)
    ending.start()
    ending.join(10.0)
    assert not ending.is_alive(), "a socket is open"


@pytest.mark.parametrize(
    ("vector", "error", "expected"),
    [
        ([1.5, -2.0], None, Output(reason="stop", num_cached_tokens=3, vector=struct.pack("<2f", 1.5, -2.0))),
        ([1.5, math.nan], None, Output(reason="stop", num_cached_tokens=3, vector=b"")),
        ([], None, Output(reason="error")),  # an aborted request
        ([1.5], "vLLM failed", Output(reason="error")),
    ],
    ids=["finite", "not finite", "none", "failed"],
)
def test_a_pooled_prompt_has_a_vector_of_float32(vector: list[float], error: str | None, expected: Output) -> None:
    data = SimpleNamespace(data=torch.tensor(vector, dtype=torch.bfloat16))
    found: Any = SimpleNamespace(outputs=data, error=error, num_cached_tokens=3)
    assert pooled_output(found) == expected


def test_timeouts_and_streams_reach_the_connectors() -> None:
    link = "ipc:///x", b"key"
    parts: Any = SimpleNamespace(identity=SimpleNamespace(worker_id="w", epoch=1, role="decode"))
    decode = DecodeWorkerConfig(engine="vllm", grant_timeout_s=7.0, transfer_timeout_s=8.0, kv_port=9)
    found = connector_settings(decode, parts, *link)
    assert (found.grant_timeout_s, found.transfer_timeout_s, found.kv_port) == (7, 8, 9)
    prefill = PrefillWorkerConfig(engine="vllm", kv_lease_s=3.0, kv_streams=2)
    found = connector_settings(prefill, parts, *link)
    assert (found.lease_s, found.num_streams, found.kv_port) == (3, 2, 0)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_only_decode_workers_have_memory_for_kv_that_arrives(role: str) -> None:
    parts: Any = SimpleNamespace(identity=SimpleNamespace(worker_id="w", epoch=1, role=role))
    assert connector_settings(DecodeWorkerConfig(engine="vllm"), parts, "ipc:///x", b"").receives is (role == "decode")


def drafting(is_hybrid: bool, method: str | None, device: str) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(is_hybrid=is_hybrid),
        speculative_config=SimpleNamespace(method=method) if method else None,
        device_config=SimpleNamespace(device_type=device),
    )


@pytest.mark.parametrize(
    ("is_hybrid", "method", "device"), [(True, None, "cpu"), (False, "ngram", "cpu"), (True, "mtp", "cuda")]
)
def test_drafts_with_recurrent_state_are_for_gpus(is_hybrid: bool, method: str | None, device: str) -> None:
    check_drafts(drafting(is_hybrid, method, device))
    with pytest.raises(ConfigError, match=r"speculative_config='ngram': must be omitted on CPUs for a model with rec"):
        check_drafts(drafting(True, "ngram", "cpu"))


FULL, WINDOW = KVGroup("full", 16, 2, 100), KVGroup("window", 16, 2, 100, window=64)


@pytest.mark.parametrize(
    ("groups", "drops_last", "expected"),
    [
        ([(FULL,)], False, 5),
        ([(FULL,), (FULL,)], True, 4),
        ([(FULL, WINDOW)], False, 0),
        ([(FULL,), (FULL, WINDOW)], False, 0),
    ],
)
def test_cached_blocks_need_not_be_received_if_vllm_uses_them(
    groups: list[tuple[KVGroup, ...]], drops_last: bool, expected: int
) -> None:
    speculation = SimpleNamespace(use_eagle_block_drop=lambda: True) if drops_last else None
    model = VllmModel.__new__(VllmModel)
    model._llm = SimpleNamespace(vllm_config=SimpleNamespace(speculative_config=speculation))
    model._rooms = [room(one, 10) for one in groups]
    assert model.num_skipped(5) == expected and model.num_skipped(0) == 0


def test_kv_of_a_prompt_must_fit_into_the_memory_of_every_rank() -> None:
    model = VllmModel.__new__(VllmModel)
    model._rooms = [room((FULL,), 10), room((FULL, WINDOW), 14)]
    assert model.fits(160, 0) and not model.fits(161, 0)
    model._rooms = [room((FULL,), 10), room((FULL, WINDOW), 13)]
    assert not model.fits(160, 0)
    model._rooms = [room((FULL,), 10)]
    assert model.fits(176, 1) and not model.fits(177, 1)


def room(groups: tuple[KVGroup, ...], num_slots: int) -> RankReady:
    return RankReady(rank=0, world_size=1, kv_address="", layout="", groups=groups, num_slots=num_slots)


@pytest.mark.parametrize(
    ("addresses", "hosts", "expected"),
    [
        (["tcp://0.0.0.0:7", "tcp://0.0.0.0:8"], ["node-1", "node-1"], "tcp://node-1:7,8"),
        (["tcp://0.0.0.0:7"], ["::1"], "tcp://[::1]:7"),
        (["tcp://10.0.0.1:7", "tcp://10.0.0.1:8"], ["", ""], "tcp://10.0.0.1:7,8"),
        (["tcp://[::]:7", "tcp://[::]:8"], ["10.0.0.1", "10.0.0.2"], "tcp://10.0.0.1:7,tcp://10.0.0.2:8"),
    ],
)
def test_all_ranks_are_advertised(addresses: list[str], hosts: list[str], expected: str) -> None:
    assert advertised(addresses, hosts) == expected


def test_vllms_own_series_have_the_labels_of_the_worker() -> None:
    own = Gauge("vllm:only_of_vllm", "A series of vLLM", ["model_name", "engine"])
    shared = Counter("vllm:generation_tokens", "One that Diptych counts too", ["model_name", "engine"])
    try:
        own.labels("m", "0").set(3)
        shared.labels("m", "0").inc()
        metrics = WorkerMetrics("model", "decode-0", EngineStatus)
        metrics.register(VllmCollector)
        labels = {"model_name": "model", "engine": "decode-0"}
        assert metrics.registry.get_sample_value("vllm:only_of_vllm", labels) == 3
        assert metrics.registry.get_sample_value("vllm:generation_tokens_total", labels) == 0
        families = [family.name for family in metrics.registry.collect()]
        assert len(families) == len(set(families))
    finally:
        REGISTRY.unregister(own)
        REGISTRY.unregister(shared)


def test_processes_that_are_left_at_the_end_are_killed_at_once(tmp_path: Path) -> None:
    """They have had SIGTERM from vLLM, and only free memory, for longer than a supervisor waits."""
    got_term = tmp_path / "got-term"
    script = f"trap 'touch {got_term}; exit' TERM; echo ready; while true; do sleep 0.05; done"
    with subprocess.Popen(["bash", "-c", script], stdout=subprocess.PIPE, text=True) as left:
        assert left.stdout is not None and left.stdout.readline()
        of_vllm = SimpleNamespace(use_v2_model_runner=True, model_config=SimpleNamespace(pooler_config=None))
        llm: Any = SimpleNamespace(vllm_config=of_vllm, output_handler=None, shutdown=lambda timeout: None)
        nothing: Any = None
        model = VllmModel(
            CoreThread(), llm, nothing, nothing, nothing, CoreFiles(tmp_path), PrivateFolder("test"),
            vocab_size=9, eos_token_ids=(), pooling="", kv_address="", adapters=None, hosts=None, ranks=(),
        )  # fmt: skip
        model._processes = frozenset({left.pid})
        model.close()
        assert left.wait(30) == -signal.SIGKILL and not got_term.exists()


def test_drafts_of_all_steps_are_counted() -> None:
    metrics, counter = WorkerMetrics("model", "decode-0", EngineStatus), DraftCounter()
    config: Any = SimpleNamespace(speculative_config=SimpleNamespace(method="eagle"))
    logger = counter(config, 0)
    step: Any = SimpleNamespace(
        spec_decoding_stats=SimpleNamespace(num_drafts=2, num_draft_tokens=6, num_accepted_tokens_per_pos=[2, 1, 0])
    )
    idle: Any = SimpleNamespace(spec_decoding_stats=None)
    logger.record(step, None, mm_cache_stats=None, engine_idx=0)  # before the worker has metrics
    counter.metrics = metrics.drafts
    for stats in (step, idle, None, step):
        logger.record(stats, None, mm_cache_stats=None, engine_idx=0)
    labels = {"model_name": "model", "engine": "decode-0"}
    found = [
        metrics.registry.get_sample_value(f"vllm:spec_decode_num_{name}_total", labels | {"kind": "model"})
        for name in ("drafts", "draft_tokens", "accepted_tokens")
    ]
    assert found == [4, 12, 6]
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert metrics.registry.get_sample_value(name, labels | {"position": "0"}) == 4


def test_drafts_of_a_request_are_read_from_a_histogram() -> None:
    assert Drafts.of_histogram([3, 0, 2, 1], 15) == Drafts(6, 15, (3, 3, 1))
    assert Drafts.of_histogram([0, 0], 0) == Drafts(0, 0, (0,))
    assert len(Drafts.of_histogram([1] * 100, 99).accepted) == 64


def test_no_series_of_workers_is_exported_twice() -> None:
    names = {family.name for family in WorkerMetrics("m", "w", EngineStatus).registry.collect()}
    of_vllm = {name for name in names if name.startswith("vllm:")}
    assert of_vllm <= COMMON_SERIES, "add it to COMMON_SERIES"


def adapter(folder: Path, *, scale: int = 16, weights: bytes = b"weights") -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"r": 8, "lora_alpha": scale}))
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return folder


def test_an_adapter_is_known_by_its_contents(tmp_path: Path) -> None:
    first = describe_adapter(adapter(tmp_path / "a"))
    assert first == describe_adapter(adapter(tmp_path / "b")) and first[1:] == (8, 7)
    assert first[0] != describe_adapter(adapter(tmp_path / "c", scale=32))[0]
    assert first[0] != describe_adapter(adapter(tmp_path / "d", weights=b"others!"))[0]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match="not an adapter"):
        describe_adapter(tmp_path / "empty")


async def test_adapters_take_places_until_no_request_uses_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    removed: list[int] = []

    class Client:
        async def remove_lora(self, number: int) -> None:
            removed.append(number)

    client: Any = Client()
    adapters = VllmAdapters(client, asyncio.get_running_loop(), 1)
    request = SimpleNamespace(lora_int_id=1)
    monkeypatch.setattr(adapters, "_added", lambda digest, path: request)
    held = adapters.load("a", str(adapter(tmp_path / "a")))
    assert adapters.request(held.digest) is request and len(held.digest) == 32
    assert adapters.load("same", str(tmp_path / "a")) is held
    with pytest.raises(ModelError, match="--max-loras"):
        adapters.load("b", str(adapter(tmp_path / "b", scale=1)))
    adapters.retire(held.digest)
    adapters.free(frozenset({held.digest}))
    assert adapters.request(held.digest) is request
    adapters.free(frozenset())
    await asyncio.sleep(0)
    assert removed == [1] and adapters.request(held.digest) is None


async def test_an_adapter_is_freed_while_another_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine thread frees adapters, and is also what loads them: it must not wait for the end of a load."""
    adapters: VllmAdapters
    loaded: list[bool] = []

    def load(digest: str, path: str) -> Any:
        async def free() -> None:
            adapters.free(frozenset())

        freed = asyncio.run_coroutine_threadsafe(free(), thread.loop)
        with contextlib.suppress(TimeoutError):
            freed.result(60.0)
        loaded.append(freed.done())
        return SimpleNamespace(lora_int_id=len(loaded))

    async def remove_lora(number: int) -> None:
        """Takes no time."""

    thread, client = CoreThread(), SimpleNamespace(remove_lora=remove_lora)
    adapters = VllmAdapters(client, thread.loop, 3)  # type: ignore[arg-type]
    monkeypatch.setattr(adapters, "_added", load)
    for name in ("a", "b"):
        held = await asyncio.to_thread(adapters.load, name, str(adapter(tmp_path / name, weights=name.encode())))
        adapters.retire(held.digest)
    thread.close()
    assert loaded == [True, True] and len(adapters) == 1
