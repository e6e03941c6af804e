"""What a worker runs before its first request; memory that does not suffice is a setting that is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from common.config import DecodeWorkerConfig, PrefillWorkerConfig
from common.engine.kv.cache import KVCache
from common.engine.run.memory_need import step_tokens
from common.engine.run.runner import ModelRunner
from common.engine.run.warm_up import SAMPLED, largest_step, run_every_kind, warm_up_runner
from common.engine.sampling.sampler import Sampler
from common.errors import ConfigError


@pytest.fixture
def runner(tiny: Any) -> ModelRunner:
    model, _ = tiny
    return ModelRunner(model, KVCache(model.config, 10, 16, "float32"))


@pytest.mark.parametrize(
    ("num_tokens", "longest", "expected"),
    [
        (40, 1000, [(40, range(0, 3))]),
        (70, 32, [(32, range(0, 2)), (32, range(2, 4)), (6, range(4, 5))]),
        (1_000_000, 4096, [(160, range(0, 10))]),  # no more than the cache holds
        (1, 16, [(1, range(0, 1))]),
    ],
)
def test_the_largest_step(
    runner: ModelRunner, num_tokens: int, longest: int, expected: list[tuple[int, range]]
) -> None:
    chunks = largest_step(num_tokens, longest, runner.kv)
    assert [(len(chunk.token_ids), chunk.block_table) for chunk in chunks] == expected


def test_every_kind_of_step_is_run(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many rows are drawn, in each way, as a step may have."""
    drawn: list[int] = []
    sample = Sampler.sample

    def counted(sampler: Sampler, logits: torch.Tensor, rows: Any) -> Any:
        drawn.append(len(rows))
        return sample(sampler, logits, rows)

    monkeypatch.setattr(Sampler, "sample", counted)
    run_every_kind(runner, 100, 7)
    assert drawn == [7] * len(SAMPLED)
    assert runner.profile.num_tokens == 7  # the rows at the longest sequence's end came last
    written = runner.kv.tensor.flatten(1).any(1)
    assert written[:7].all() and written[9] and not written[7:9].any()  # blocks of 100 tokens, and of token 159


def test_the_size_of_a_step_is_the_settings() -> None:
    assert step_tokens(PrefillWorkerConfig(max_num_batched_tokens=3000)) == 3000
    assert step_tokens(DecodeWorkerConfig(max_num_seqs=20, local_prefill_chunk=100)) == 120


@pytest.mark.parametrize(
    ("settings", "field"), [({"kv_memory_gib": 70.0}, "kv_memory_gib=70.0"), ({"num_blocks": 9}, "num_blocks=9")]
)
def test_too_large_a_cache_is_refused(settings: dict[str, Any], field: str) -> None:
    def make() -> ModelRunner:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore words")

    with pytest.raises(ConfigError, match=rf"{field}: must be lower.*512 tokens .*2.00 GiB\.\)$"):
        warm_up_runner(make, PrefillWorkerConfig(**settings))
