"""Settings that do not go with several ranks are refused before anything is loaded."""

from __future__ import annotations

from typing import Any

import pytest

from common.config import DecodeWorkerConfig, PrefillWorkerConfig
from common.errors import ConfigError
from common.ranks.loading import device_of


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
