"""Settings that are not given depend on the device."""

from __future__ import annotations

import pytest

from common.config import DecodeWorkerConfig, PrefillWorkerConfig
from common.errors import ConfigError


def test_a_gpu_has_larger_blocks_and_steps_and_what_memory_is_left() -> None:
    cpu, gpu = PrefillWorkerConfig(), PrefillWorkerConfig(device="cuda:1")
    assert (cpu.block_tokens, cpu.step_tokens, cpu.kv_gib) == (16, 512, 1.0)
    assert (gpu.block_tokens, gpu.step_tokens, gpu.kv_gib) == (64, 8192, 0.0)
    assert (DecodeWorkerConfig(device="cuda").block_tokens, DecodeWorkerConfig().kv_gib) == (64, 1.0)


def test_a_gpu_has_as_many_rows_as_its_kv_cache_has_room_for() -> None:
    """A CPU's do not depend on it, nor do rows that are given."""
    cpu, gpu = DecodeWorkerConfig(), DecodeWorkerConfig(device="cuda")
    assert (cpu.places, gpu.places, gpu.usual_places) == (64, 256, 256)
    tokens = (100, 512 * 48 + 7, 850_000)
    assert [gpu.places_within(count) for count in tokens] == [1, 48, 256]
    assert [cpu.places_within(count) for count in tokens] == [64] * 3
    given = DecodeWorkerConfig(device="cuda", max_num_seqs=400)
    assert [given.places_within(count) for count in tokens] == [400] * 3
    goal = DecodeWorkerConfig(device="cuda", slo_tpot_ms=20.0)
    assert (goal.places, goal.usual_places) == (256, 64)  # until predictions say how many the goal allows
    assert PrefillWorkerConfig(device="cuda").places_within(100) == PrefillWorkerConfig().places


def test_auto_is_no_device_until_it_is_replaced() -> None:
    auto = DecodeWorkerConfig()
    assert (auto.device, auto.on_gpu, auto.torch_device) == ("auto", False, "cpu")
    assert DecodeWorkerConfig(device="cuda:1").torch_device == "cuda:1"
    DecodeWorkerConfig(kv_host_gib=1.0)  # what only one device takes is not refused yet
    DecodeWorkerConfig(kv_cache_dtype="int8")
    DecodeWorkerConfig(kv_transport="cuda-ipc")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_is_given_holds_everywhere(device: str) -> None:
    given = PrefillWorkerConfig(device=device, block_size=32, max_num_batched_tokens=100, kv_memory_gib=2.5)
    assert (given.block_tokens, given.step_tokens, given.kv_gib) == (32, 100, 2.5)


def test_draft_tokens_are_refused_where_they_would_change_bits() -> None:
    """On a GPU, where a row that is checked beside others goes through another attention kernel than a lone one."""
    with pytest.raises(ConfigError, match="max_draft_tokens=6: must be 0 on cuda with --batch-invariant"):
        DecodeWorkerConfig(device="cuda", batch_invariant=True)
    assert DecodeWorkerConfig(device="cuda", batch_invariant=True, max_draft_tokens=0).batch_invariant
    assert DecodeWorkerConfig(batch_invariant=True).max_draft_tokens == 6
