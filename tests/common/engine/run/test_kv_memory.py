"""The size of a KV cache by what steps leave of a GPU's memory, over memory that is pretended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from common.config import DecodeWorkerConfig, PrefillWorkerConfig, WorkerConfig
from common.engine.kv.cache import block_bytes
from common.engine.run.kv_memory import blocks_left
from common.engine.run.loaded import num_kv_blocks, use_exact_sums
from common.engine.run.memory_need import GIB
from common.engine.sampling.sampler import Sampler
from common.errors import ConfigError

SMALL = {"max_num_seqs": 3, "gpu_memory_utilization": 0.5}


class PretendedMemory:
    """Of 8 GiB `free` are free and `used` are this process'; a step takes `step`, and its cache `cache` beside."""

    def __init__(self, free: float, used: float, step: int, cache: int) -> None:
        self._free, self._used, self._peak = int(free * GIB), int(used * GIB), step + cache
        self.num_runs = 0

    def free_and_total(self) -> tuple[int, int]:
        return self._free, 8 * GIB

    def used(self) -> int:
        return self._used

    def peak_of(self, run: Callable[[], None]) -> int:
        run()
        self.num_runs += 1
        return self._peak


def found(
    tiny: Any, config: WorkerConfig, *, free: float = 7.0, used: float = 1.0, step: int = GIB // 2, **options: Any
) -> float:
    """GiB of the blocks that fit."""
    model, _ = tiny
    per_block = block_bytes(model.config, config.block_tokens, "float32")
    tried = -(-model.config.max_model_len // config.block_tokens)
    memory = PretendedMemory(free, used, step, tried * per_block)
    count = blocks_left(model, config, "float32", memory, **options)
    assert memory.num_runs == 1
    return count * per_block / GIB


def test_what_the_share_leaves_beside_weights_and_steps(tiny: Any) -> None:
    prefill = PrefillWorkerConfig(**SMALL, max_num_batched_tokens=40)
    assert found(tiny, prefill) == pytest.approx(8 * 0.5 - 1 - 0.5, abs=1e-3)


def test_recorded_steps_have_memory_of_their_own(tiny: Any) -> None:
    decode = DecodeWorkerConfig(**SMALL, local_prefill_chunk=20)
    assert found(tiny, decode) == pytest.approx(8 * 0.5 - 1 - 2 * 0.5, abs=1e-3)
    plain = DecodeWorkerConfig(**SMALL, local_prefill_chunk=20, cuda_graphs=False)
    assert found(tiny, plain) == pytest.approx(8 * 0.5 - 1 - 0.5, abs=1e-3)


def test_others_on_the_gpu_leave_less(tiny: Any) -> None:
    prefill = PrefillWorkerConfig(**SMALL, max_num_batched_tokens=40)
    assert found(tiny, prefill, free=1.25) == pytest.approx(0.75, abs=1e-3)


def test_steps_are_tried_with_as_many_rows_as_may_be_sampled(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    sample = Sampler.sample

    def counted(sampler: Sampler, logits: torch.Tensor, rows: Any) -> Any:
        drawn.append(len(rows))
        return sample(sampler, logits, rows)

    monkeypatch.setattr(Sampler, "sample", counted)
    found(tiny, DecodeWorkerConfig(**SMALL, local_prefill_chunk=20))
    assert set(drawn) == {3}


def test_no_room_is_refused_with_the_numbers(tiny: Any) -> None:
    words = (
        r"gpu_memory_utilization=0.5: must be higher, .* of 8.00 GiB, this worker uses 3.90 GiB, its steps take 0.50"
    )
    with pytest.raises(ConfigError, match=words):
        found(tiny, PrefillWorkerConfig(**SMALL, max_num_batched_tokens=40), used=3.9)


def test_no_room_on_another_rank_is_refused_with_the_blocks_of_this_one(tiny: Any) -> None:
    def least(own: int) -> int:
        """Of the blocks to try, then of those that fit: 1 on the other rank."""
        asked.append(own)
        return own if len(asked) == 1 else 1

    asked: list[int] = []
    with pytest.raises(
        ConfigError, match=r"fewer than 2 KV blocks fit on another rank, \d+ fit on this one"
    ) as refused:
        found(tiny, PrefillWorkerConfig(**SMALL, max_num_batched_tokens=40), least=least)
    assert f" {asked[1]} fit on this one" in str(refused.value)


def test_steps_beyond_the_memory_are_refused_with_the_numbers(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_much(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB\nmore words")

    monkeypatch.setattr("common.engine.run.kv_memory.run_every_kind", too_much)
    words = (
        r"=0.5: must be higher, or use smaller steps: a step of 40 tokens .* 7.00 GiB of 8.00 GiB .*allocate 9 GiB\)$"
    )
    with pytest.raises(ConfigError, match=words):
        found(tiny, PrefillWorkerConfig(**SMALL, max_num_batched_tokens=40))


def test_numbers_that_are_given_are_taken(tiny: Any) -> None:
    model, _ = tiny
    assert num_kv_blocks(model, PrefillWorkerConfig(num_blocks=7, device="cuda"), "float32", samples=True) == 7
    one = num_kv_blocks(
        model, PrefillWorkerConfig(kv_memory_gib=1.0, device="cuda", block_size=16), "float32", samples=True
    )
    assert one == num_kv_blocks(model, PrefillWorkerConfig(), "float32", samples=True)  # a GiB on a CPU


def test_products_are_added_up_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    products = torch.backends.cuda.matmul
    before = products.allow_bf16_reduced_precision_reduction, products.allow_fp16_reduced_precision_reduction
    try:
        products.allow_bf16_reduced_precision_reduction = products.allow_fp16_reduced_precision_reduction = True
        torch.set_float32_matmul_precision("high")
        use_exact_sums()
        assert not products.allow_bf16_reduced_precision_reduction
        assert not products.allow_fp16_reduced_precision_reduction
        assert torch.get_float32_matmul_precision() == "highest"
    finally:
        products.allow_bf16_reduced_precision_reduction, products.allow_fp16_reduced_precision_reduction = before
