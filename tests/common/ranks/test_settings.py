"""Settings that do not go with several ranks are refused before anything is loaded."""

from __future__ import annotations

from typing import Any

import pytest

from common.config import DecodeWorkerConfig, PrefillWorkerConfig
from common.errors import ConfigError
from common.model.load import load_model
from common.model_config.shard import Shard
from common.model_files.resolve import resolve_model
from common.model_files.task import GENERATES
from common.ranks.load_shard import load_shard
from common.ranks.loading import device_of, plans

from ..model.threaded_ranks import Sums


def test_on_gpus_the_size_of_the_cache_must_be_given() -> None:
    PrefillWorkerConfig(device="cuda")
    with pytest.raises(ConfigError) as refused:
        PrefillWorkerConfig(device="cuda", tensor_parallel_size=2)
    wanted = "kv_memory_gib=0.0 is refused: above 0, or --num-blocks, on cuda with --tensor-parallel-size 2"
    assert str(refused.value).startswith(wanted)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"kv_cache_dtype": "int8"},
        {"quantization": "int8"},
        {"role_change": True},
        {"kv_transport": "shm"},
        {"device": "cuda", "kv_memory_gib": 1.0},
    ],
)
def test_what_they_do(settings: dict[str, Any]) -> None:
    assert DecodeWorkerConfig(**settings, tensor_parallel_size=2).tensor_parallel_size == 2


def test_ranks_have_neighbouring_devices() -> None:
    assert [device_of("cuda:4", rank) for rank in range(3)] == ["cuda:4", "cuda:5", "cuda:6"]
    assert [device_of("cuda", rank) for rank in range(2)] == ["cuda:0", "cuda:1"]
    assert [device_of("cpu", rank) for rank in range(2)] == ["cpu", "cpu"]


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_every_rank_multiplies_alike(batch_invariant: bool) -> None:
    files = resolve_model("tiny-random")
    config = DecodeWorkerConfig(tensor_parallel_size=2, batch_invariant=batch_invariant)
    (plan,) = plans(files, config, GENERATES, "float32", "float32", "meeting")
    assert plan.batch_invariant == batch_invariant
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "quantization": "none"}
    shard = load_shard(files, Shard(0, 2), Sums(), **options, batch_invariant=batch_invariant)
    for model in (shard, load_model(files, **options, batch_invariant=batch_invariant)):
        assert model.weights.layers[0].qkv.batch_invariant == batch_invariant
        assert model.weights.lm_head is not None and model.weights.lm_head.batch_invariant == batch_invariant
