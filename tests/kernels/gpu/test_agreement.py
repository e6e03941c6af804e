"""The check of a worker's start, in the interpreter: right kernels agree at many shapes, broken ones are refused."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import triton
import triton.language as tl

from common.engine.kv.cache import KVCache
from common.engine.models.load import load_model
from common.engine.run.kernel_check import check_model_kernels
from common.errors import ModelError
from common.model_files.tiny import make_tiny_model
from kernels import UNSCALED, AttentionRule, Experts, KVScales
from kernels.agreement import run
from kernels.agreement.attention import attention_checks
from kernels.agreement.experts import experts_check
from kernels.agreement.gate import Finding
from kernels.agreement.poisoned_cache import FREED, PoisonedCache
from kernels.agreement.run import check_kernels
from kernels.agreement.shape import CheckedShape, LayerRule
from kernels.backends import FOUND
from kernels.experts import Expert
from kernels.gpu import backend as triton_backend
from kernels.gpu import blocks, decode_attention, held_products, prefill_attention, sampling
from kernels.gpu.device_plan import GPUPlan
from kernels.gpu.tiles import key_tile

from ...common.engine.models.generation import files_of

pytestmark = pytest.mark.interpret
attend_tile = key_tile.attend_tile


@pytest.fixture(autouse=True)
def triton_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of a CPU go through Triton's kernels, as a GPU's do."""
    monkeypatch.setitem(FOUND, "cpu", triton_backend)


def shape_of(**options: Any) -> CheckedShape:
    rule = AttentionRule(0.25, options.pop("window", 0), options.pop("softcap", 0.0), options.pop("sinks", None))
    k_scale, v_scale = options.get("scales", UNSCALED)
    rule = rule._replace(latent_dim=options.get("latent_dim", 0), k_scale=k_scale, v_scale=v_scale)
    usual: dict[str, Any] = {
        **{"num_heads": 4, "rules": [LayerRule(1, rule)], "dtype": torch.float32, "hidden_size": 24, "widths": [40]},
        **{"activation": "silu", "vocab_size": 300, "eps": 1e-5, "longest": 4096, "device_kernels": True},
    }
    return CheckedShape(**usual | options)


def cache(dtype: torch.dtype = torch.float32, *, num_blocks: int = 40, size: int = 16, dim: int = 16) -> torch.Tensor:
    return torch.zeros(num_blocks, 2, 2, size, 2, dim).to(dtype)


def latents(dtype: torch.dtype = torch.float32, *, num_blocks: int = 40, size: int = 16, dim: int = 16) -> torch.Tensor:
    return torch.zeros(num_blocks, 2, 1, size, 1, dim).to(dtype)


def problems(shape: CheckedShape, kv: torch.Tensor) -> list[str]:
    found = [str(one) for one in check_kernels(shape, kv) if one.problem]
    assert not kv.float().any(), "the cache is not as it was"
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "kv"),
    [
        ({"window": 20, "qk_norm": True, "activation": "gelu_tanh"}, {}),
        ({"wide_qk_norm": True}, {}),
        ({"softcap": 5.0, "sinks": torch.tensor([-3.0, 0.0, 4.0, 9.0])}, {"dim": 24}),
        ({"dtype": torch.bfloat16, "quantised_wire": True}, {"dtype": torch.bfloat16, "size": 64}),
        ({"dtype": torch.bfloat16}, {"dtype": torch.float8_e4m3fn, "size": 32}),
        ({"dtype": torch.bfloat16, "scales": KVScales(0.0031, 0.017)}, {"dtype": torch.float8_e4m3fn}),
        ({"scales": KVScales(7.0, 0.3)}, {"dtype": torch.float8_e4m3fn}),
        (
            {"latent_dim": 16, "query_dim": 20, "scales": KVScales(0.04, 0.04)},
            {"dim": 24, "dtype": torch.float8_e4m3fn},
        ),
        ({"vocab_size": 0, "longest": 7}, {"num_blocks": 2}),
        ({"latent_dim": 16, "query_dim": 20}, {"dim": 24}),
        (
            {"latent_dim": 16, "query_dim": 20, "dtype": torch.bfloat16},
            {"dim": 24, "dtype": torch.bfloat16, "size": 32},
        ),
    ],
)
def test_right_kernels_agree_and_leave_zeros(options: dict[str, Any], kv: dict[str, Any]) -> None:
    made = latents if "latent_dim" in options else cache
    assert problems(shape_of(**options), made(**kv)) == []


@pytest.mark.slow
@pytest.mark.parametrize("unheard", ["k_scale", "v_scale"])
def test_a_scale_that_is_not_multiplied_by_is_seen(unheard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = triton_backend.paged_attention
    monkeypatch.setattr(
        triton_backend,
        "paged_attention",
        lambda q, kv, layer, plan, rule: right(q, kv, layer, plan, rule._replace(**{unheard: 1.0})),
    )
    found = [
        one.kernel
        for one in check_kernels(shape_of(scales=KVScales(0.02, 0.03)), cache(torch.float8_e4m3fn))
        if one.problem
    ]
    assert found == ["decode attention", "prefill attention"]


@pytest.mark.slow
def test_a_scale_that_is_not_divided_by_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = triton_backend.rotate_and_write
    monkeypatch.setattr(triton_backend, "rotate_and_write", lambda *given: right(*given[:-1]))
    found = [
        one.kernel
        for one in check_kernels(shape_of(scales=KVScales(1.0, 0.3)), cache(torch.float8_e4m3fn))
        if one.problem
    ]
    assert found == ["rotary embedding and KV write"]


@pytest.mark.slow
def test_sequences_of_several_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where the check also runs the sum over splits."""
    monkeypatch.setattr(run, "HOST_TOKENS", run.TOKENS_BESIDE)
    reduced: list[int] = []
    launch = decode_attention.reduce_splits
    monkeypatch.setattr(decode_attention, "reduce_splits", _Counted(launch, reduced))
    assert problems(shape_of(dtype=torch.bfloat16, vocab_size=0), cache(torch.bfloat16, size=64)) == []
    assert reduced


class _Counted:
    def __init__(self, kernel: Any, calls: list[int]) -> None:
        self._kernel, self._calls = kernel, calls

    def __getitem__(self, grid: Any) -> Any:
        self._calls.append(1)
        return self._kernel[grid]


@triton.jit
def sees_one_more(
    b_q, b_m, b_l, b_acc, p_kv, p_table, start, begin, end, low, high, scale, softcap,
    BLOCK_STRIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, SOFTCAP: tl.constexpr, FP8_BITS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """A mask that ends one key too late."""
    return attend_tile(b_q, b_m, b_l, b_acc, p_kv, p_table, start, begin, end + 1, low, high + 1, scale, softcap,
                       BLOCK_STRIDE, BLOCK_SIZE, HEAD_DIM, BLOCK_D, BLOCK_N, SOFTCAP, FP8_BITS, MASKED)  # fmt: skip


@triton.jit
def sees_one_less(
    b_q, b_m, b_l, b_acc, p_kv, p_table, start, begin, end, low, high, scale, softcap,
    BLOCK_STRIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, SOFTCAP: tl.constexpr, FP8_BITS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """A window that begins one key too late."""
    later = tl.where(low > 0, low + 1, low)
    return attend_tile(b_q, b_m, b_l, b_acc, p_kv, p_table, start, begin, end, later, high, scale, softcap,
                       BLOCK_STRIDE, BLOCK_SIZE, HEAD_DIM, BLOCK_D, BLOCK_N, SOFTCAP, FP8_BITS, MASKED)  # fmt: skip


@triton.jit
def scales_too_much(
    b_q, b_m, b_l, b_acc, p_kv, p_table, start, begin, end, low, high, scale, softcap,
    BLOCK_STRIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, SOFTCAP: tl.constexpr, FP8_BITS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    return attend_tile(b_q, b_m, b_l, b_acc, p_kv, p_table, start, begin, end, low, high, scale * 1.05, softcap,
                       BLOCK_STRIDE, BLOCK_SIZE, HEAD_DIM, BLOCK_D, BLOCK_N, SOFTCAP, FP8_BITS, MASKED)  # fmt: skip


@pytest.mark.slow_except("sees_one_more-0-decode attention")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, which the interpreter computes with: NaN is the point
@pytest.mark.parametrize("kernel", ["decode attention", "prefill attention"])
@pytest.mark.parametrize(("broken", "window"), [(sees_one_more, 0), (sees_one_less, 20), (scales_too_much, 0)])
def test_broken_attention_is_named(monkeypatch: pytest.MonkeyPatch, kernel: str, broken: Any, window: int) -> None:
    module = decode_attention if kernel.startswith("decode") else prefill_attention
    monkeypatch.setattr(module, "attend_tile", broken)
    shape, kv = shape_of(dtype=torch.bfloat16, window=window), cache(torch.bfloat16, size=64, num_blocks=10)
    blocks_of = PoisonedCache(kv, 8, torch.Generator().manual_seed(5))
    found = [str(one) for one in (check() for check in attention_checks(shape, blocks_of)) if one.problem]
    assert len(found) == 1 and found[0].startswith(kernel), found
    assert "4 heads on 2 of 16, blocks of 64 in bfloat16" in found[0] and "tolerance 0.02" in found[0]


@pytest.mark.slow
def test_a_row_that_stays_unwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    fill = GPUPlan.fill
    monkeypatch.setattr(GPUPlan, "fill", lambda plan, spans: fill(plan, spans[:-1]))
    found = problems(shape_of(vocab_size=0), cache())
    assert [one.split(" (")[0] for one in found] == ["decode attention", "prefill attention"]
    assert all("are not finite" in one for one in found)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, about NaN
def test_a_table_that_names_a_freed_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last block of each sequence is one that belongs to nobody."""
    fill = GPUPlan.fill

    def stale(plan: GPUPlan, spans: Any) -> None:
        size = plan.layout.block_size
        fill(plan, [one._replace(block_table=[*one.block_table[: (one.length - 1) // size], FREED]) for one in spans])

    monkeypatch.setattr(GPUPlan, "fill", stale)
    found = problems(shape_of(vocab_size=0), cache())
    assert [one.split(" (")[0] for one in found] == ["decode attention", "prefill attention"]
    assert all("are not finite" in one for one in found)


@pytest.mark.slow
def test_seats_that_do_not_move_on(monkeypatch: pytest.MonkeyPatch) -> None:
    right = triton_backend.fill_rows

    def standing(memory: torch.Tensor, *arguments: Any) -> None:
        right(memory.clone(), *arguments)

    monkeypatch.setattr(triton_backend, "fill_rows", standing)
    (found,) = problems(shape_of(), cache())
    assert found.startswith("rows from seats (18 of 21 rows") and "of its seats differ" in found


@pytest.mark.slow
def test_keys_that_land_in_a_slot_beside_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    right = triton_backend.rotate_and_write

    def beside(*arguments: Any) -> torch.Tensor:
        *first, slots, norms, scales = arguments
        return right(*first, slots.where(slots < 0, slots ^ 1), norms, scales)

    monkeypatch.setattr(triton_backend, "rotate_and_write", beside)
    (found,) = problems(shape_of(vocab_size=0), cache())
    assert found.startswith("rotary embedding and KV write") and "slots" in found


@pytest.mark.slow
def test_sampling_that_overlooks_a_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    right = sampling.sample
    monkeypatch.setattr(triton_backend, "sample", lambda logits, rows, allowed: right(logits.nan_to_num(0.0), rows))
    (found,) = problems(shape_of(), cache())
    assert found.startswith("sampling") and "of 4 rows with NaN yield a token" in found


@pytest.mark.slow
def test_a_copy_that_ends_early(monkeypatch: pytest.MonkeyPatch) -> None:
    right = blocks.gather_blocks

    def cut(kv: torch.Tensor, ids: torch.Tensor, buffer: torch.Tensor, quantised: bool) -> None:
        right(kv, ids, buffer, quantised)
        buffer[-1, -64:] = 0

    monkeypatch.setattr(triton_backend, "gather_blocks", cut)
    (found,) = problems(shape_of(vocab_size=0), cache())
    assert found.startswith("gather blocks") and "bytes differ" in found


@pytest.mark.slow
def test_a_sum_that_leaves_out_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    right = blocks.block_sums

    def wrong(kv: torch.Tensor, ids: torch.Tensor, out: torch.Tensor) -> None:
        right(kv, ids, out)
        out[-1] += 1

    monkeypatch.setattr(triton_backend, "block_sums", wrong)
    (found,) = problems(shape_of(vocab_size=0), cache())
    assert found.startswith("sums of blocks") and "1 of" in found


@pytest.mark.slow
def test_a_kernel_that_fails_is_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> torch.Tensor:
        raise RuntimeError("an illegal memory access was encountered\nmore words")

    monkeypatch.setattr(triton_backend, "rms_norm", fail)
    found = check_kernels(shape_of(vocab_size=0), cache())
    assert [one.kernel for one in found] == ["decode attention", "prefill attention", found[2].kernel, "norms"]
    assert found[-1].problem == "RuntimeError: an illegal memory access was encountered"


@pytest.fixture
def experts() -> Experts:
    random = torch.Generator().manual_seed(3)
    made = [
        Expert(*(torch.randn(*size, generator=random) / 6 for size in ((2 * 40, 24), (24, 40), (80,), (24,))))
        for _ in range(6)
    ]
    return Experts(made, dtype=torch.float32)


def of_experts(experts: Experts) -> Finding:
    return experts_check(experts, 2, 24, "silu", torch.device("cpu"), torch.Generator().manual_seed(1))


@pytest.mark.slow
def test_experts_beside_plain_products(experts: Experts, monkeypatch: pytest.MonkeyPatch) -> None:
    assert of_experts(experts).problem == ""
    right = held_products.experts
    monkeypatch.setattr(
        held_products, "experts", lambda x, chosen, shares, *rest: right(x, (chosen + 1) % 6, shares, *rest)
    )
    assert "off by" in of_experts(experts).problem


@pytest.fixture
def loaded(tmp_path: Path) -> Iterator[tuple[Any, KVCache]]:
    model = load_model(files_of(make_tiny_model(tmp_path / "model", architecture="gemma3")))
    yield model, KVCache(model.config, 60, 16, model.dtype)


@pytest.mark.slow
def test_a_worker_says_how_many_agree(loaded: tuple[Any, KVCache], caplog: pytest.LogCaptureFixture) -> None:
    """Gemma: a window and none, norms of heads, gelu."""
    with caplog.at_level(logging.INFO):
        check_model_kernels(*loaded)
    assert "12 kernels agree on " in caplog.text
    assert not cast(Any, loaded[1].tensor).any()


@pytest.mark.slow
def test_a_worker_refuses_to_start(loaded: tuple[Any, KVCache], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_attention, "attend_tile", sees_one_more)
    with pytest.raises(
        ModelError, match="2 of 12 kernels on cpu do not compute .* decode attention .* window 32"
    ) as error:
        check_model_kernels(*loaded)
    assert "--no-kernel-check" in str(error.value)
