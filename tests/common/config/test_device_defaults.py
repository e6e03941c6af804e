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


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_is_given_holds_everywhere(device: str) -> None:
    given = PrefillWorkerConfig(device=device, block_size=32, max_num_batched_tokens=100, kv_memory_gib=2.5)
    assert (given.block_tokens, given.step_tokens, given.kv_gib) == (32, 100, 2.5)


def test_draft_tokens_are_refused_where_they_would_change_bits() -> None:
    """On a GPU, where a row that is checked beside others goes through another attention kernel than a lone one."""
    with pytest.raises(ConfigError, match="max_draft_tokens=6 is refused: 0 on cuda with --batch-invariant"):
        DecodeWorkerConfig(device="cuda", batch_invariant=True)
    assert DecodeWorkerConfig(device="cuda", batch_invariant=True, max_draft_tokens=0).batch_invariant
    assert DecodeWorkerConfig(batch_invariant=True).max_draft_tokens == 6
