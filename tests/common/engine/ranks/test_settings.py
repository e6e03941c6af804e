"""Settings that do not go with several ranks are refused before anything is loaded."""

from __future__ import annotations

from typing import Any

import pytest

from common.config import DecodeWorkerConfig, RankHostConfig
from common.config.sources import read
from common.engine.models.load import load_model
from common.engine.ranks.loading import device_of, plans
from common.engine.ranks.shard import load_shard
from common.engine.run.memory_need import MemoryNeed
from common.engine.weights.formats.kv_scales import KVCacheFormat
from common.errors import ConfigError
from common.model_files.architecture.shard import Shard
from common.model_files.resolve import resolve_model
from common.model_files.task import GENERATES

from ..models.threaded_ranks import Sums

NEED = MemoryNeed("tiny-random", 0, 0, "")


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"kv_cache_dtype": "int8"},
        {"quantization": "int8"},
        {"role_change": True},
        {"kv_transport": "shm"},
        {"device": "cuda", "kv_memory_gib": 1.0},
        {"device": "cuda", "gpu_memory_utilization": 0.5},
    ],
)
def test_what_they_do(settings: dict[str, Any]) -> None:
    assert DecodeWorkerConfig(**settings, tensor_parallel_size=2).tensor_parallel_size == 2


def test_ranks_have_neighbouring_devices() -> None:
    assert [device_of("cuda:4", rank) for rank in range(3)] == ["cuda:4", "cuda:5", "cuda:6"]
    assert [device_of("cuda", rank) for rank in range(2)] == ["cuda:0", "cuda:1"]
    assert [device_of("cpu", rank) for rank in range(2)] == ["cpu", "cpu"]


@pytest.mark.parametrize(
    ("settings", "refusal"),
    [
        (
            {"tensor_parallel_size": 6, "rank_hosts": 4, "rank_port": 7005},
            "invalid rank_hosts=4: must be 1, 2, 3, 6 with --tensor-parallel-size 6",
        ),
        ({"rank_hosts": 2, "rank_port": 7005}, "invalid rank_hosts=2: must be 1 with --tensor-parallel-size 1"),
        ({"tensor_parallel_size": 4, "rank_hosts": 2}, "invalid rank_port=0: must be 1 or more with --rank-hosts 2"),
        ({"tensor_parallel_size": 4, "rank_port": 7005}, "invalid rank_port=7005: must be 0 without --rank-hosts"),
        (
            {"tensor_parallel_size": 4, "rank_hosts": 2, "rank_port": 7005, "engine": "diptych"},
            "invalid rank_hosts=2: must be 1 without --engine vllm",
        ),
    ],
)
def test_each_host_has_as_many_ranks_and_finds_the_worker(settings: dict[str, Any], refusal: str) -> None:
    with pytest.raises(ConfigError) as refused:
        DecodeWorkerConfig(**{"engine": "vllm"} | settings)
    assert str(refused.value) == refusal


@pytest.mark.parametrize(
    ("flags", "refusal"),
    [
        ([], "missing --leader: must be HOST:PORT of a worker with --rank-hosts, such as 10.0.0.7:7005"),
        (["--leader", "somewhere"], "invalid --leader somewhere: must be HOST:PORT, such as 10.0.0.7:7005"),
        (["--leader", "a:70000"], "invalid --leader a:70000: must be a port from 1 to 65535"),
    ],
)
def test_a_rank_host_needs_a_leader(flags: list[str], refusal: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read(RankHostConfig, flags, environ={})
    assert str(refused.value) == refusal


def test_a_rank_host_takes_addresses_of_both_families() -> None:
    for leader in ("10.0.0.7:7005", "demo-0.demo-0.llm:7005", "[fd00::7]:7005"):
        assert read(RankHostConfig, [], environ={"DIPTYCH_RANK_HOST_LEADER": leader}).leader == leader


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_every_rank_multiplies_alike(batch_invariant: bool) -> None:
    files = resolve_model("tiny-random")
    config = DecodeWorkerConfig(tensor_parallel_size=2, batch_invariant=batch_invariant)
    (plan,) = plans(files, config, GENERATES, "float32", KVCacheFormat("float32"), "rendezvous", NEED)
    assert plan.batch_invariant == batch_invariant
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "quantization": "none"}
    shard = load_shard(files, Shard(0, 2), Sums(), **options, batch_invariant=batch_invariant)
    for model in (shard, load_model(files, **options, batch_invariant=batch_invariant)):
        assert model.weights.layers[0].qkv.batch_invariant == batch_invariant
        assert model.weights.lm_head is not None and model.weights.lm_head.batch_invariant == batch_invariant
