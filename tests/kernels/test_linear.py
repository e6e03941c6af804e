from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kernels import Embedding, GatedLinear, Linear, QuantisedWeight, quantise
from kernels.backends import FOUND
from kernels.cpu.backend import NativeBackend, native_backend
from kernels.cpu.packed import BF16, BF16_12BIT, FLOAT32, WIDENED_BF16, WIDENED_FP16
from kernels.interface.quantised_weight import E2M1, stack
from kernels.plain import backend as plain_backend
from kernels.plain import reference

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: {"rtol": 1e-5, "atol": 1e-4}, torch.bfloat16: {"rtol": 0.01, "atol": 0.1}}


@pytest.fixture
def native() -> NativeBackend:
    return native_backend() or pytest.skip("no C++ compiler here")


@pytest.mark.quick_cover(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), [(960, 576), (61, 160), (7, 5), (49, 62)])
@pytest.mark.parametrize("biased", [False, True])
def test_product(dtype: torch.dtype, rows: int, columns: int, biased: bool) -> None:
    weight, bias = torch.randn(rows, columns).to(dtype), torch.randn(rows).to(dtype) if biased else None
    x = torch.randn(9, columns).to(dtype)
    expected = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(Linear(weight, bias)(x).double(), expected, **TOLERANCE[dtype])
    wide = Linear(weight, bias)(x, wide=True)
    assert wide.dtype == torch.float32
    torch.testing.assert_close(wide.double(), expected, **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("width", [96, 40])  # whole panels of gates and ups, and not
def test_gated_product(dtype: torch.dtype, activation: str, width: int) -> None:
    weight, bias = torch.randn(2 * width, 64).to(dtype), torch.randn(2 * width).to(dtype)
    x = torch.randn(13, 64).to(dtype)
    linear = GatedLinear(weight, bias)
    assert torch.equal(linear.weight, weight)
    expected = reference.gated(functional.linear(x.double(), weight.double(), bias.double()), activation)
    got = linear.activated(x, activation).double()
    tolerance = {"rtol": 0.05, "atol": 0.5} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-3}
    torch.testing.assert_close(got, expected, **tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_weight_unpacks_exactly(dtype: torch.dtype) -> None:
    weight = torch.randn(963, 577).to(dtype)
    assert torch.equal(Linear(weight.clone()).weight, weight)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("cls", [Linear, GatedLinear])
def test_quantised_weight_unpacks_exactly(bits: int, cls: type[Linear]) -> None:
    weight = quantised(torch.randn(160, 128), bits)
    assert torch.equal(cls(weight, dtype=torch.float32).weight, weight.dense(torch.float32))


@pytest.mark.quick_cover(2)
@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), [(960, 576), (576, 1536), (2048, 640)])
def test_a_row_is_the_same_in_every_batch(bits: int, dtype: torch.dtype, rows: int, columns: int) -> None:
    dense = torch.randn(rows, columns)
    linear = Linear(dense.to(dtype)) if bits == 16 else Linear(quantised(dense, bits), dtype=dtype)
    if not linear.packed:
        pytest.skip("this torch has no oneDNN")
    x = torch.randn(300, columns).to(dtype)
    everything = linear(x)
    for count in (1, 2, 3, 8, 31, 33, 64, 299):
        assert torch.equal(linear(x[:count].contiguous()), everything[:count]), count


@pytest.mark.quick_cover(1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), [(960, 576), (576, 1536), (2048, 640), (2048, 2048)])
def test_a_row_is_the_same_in_every_batch_of_onednn(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, rows: int, columns: int
) -> None:
    """Where our own kernels cannot be built. By AMX it is not."""
    monkeypatch.setitem(FOUND, "cpu", plain_backend)
    linear = Linear(torch.randn(rows, columns).to(dtype))
    if not linear.packed:
        pytest.skip("this torch has no oneDNN")
    x = torch.randn(300, columns).to(dtype)
    everything = linear(x)
    for count in (1, 2, 8, 15, 33, 64, 299):
        assert torch.equal(linear(x[:count].contiguous()), everything[:count]), count


@pytest.mark.quick_cover(1)
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_threads_do_not_matter(native: NativeBackend, threads: int, bits: int) -> None:
    dense, before = torch.randn(992, 192), torch.get_num_threads()
    linear = Linear(dense) if bits == 16 else Linear(quantised(dense, bits), dtype=torch.float32)
    x = torch.randn(37, 192)
    expected = linear(x)
    torch.set_num_threads(threads)
    try:
        assert torch.equal(linear(x), expected)
    finally:
        torch.set_num_threads(before)


@pytest.fixture
def pairs(native: NativeBackend) -> NativeBackend:
    return native if native.multiplies_bf16 else pytest.skip("this CPU multiplies no pairs of bfloat16")


def with_odd_weights(rows: int, columns: int) -> Tensor:
    """bfloat16 with some exponents that few others have: huge, tiny, below the normal ones, and zeros of both signs."""
    weight = torch.randn(rows, columns).bfloat16()
    flat, steps = weight.view(-1), torch.arange(rows * columns)
    for value, every in ((1e30, 4096), (-1e-37, 2048), (1e-39, 2000), (0.0, 700), (-0.0, 900)):
        flat[steps % every == every // 2] = value
    return weight


@pytest.mark.parametrize("cls", [Linear, GatedLinear])
@pytest.mark.parametrize("columns", [4, 64, 1000])
def test_weights_of_12_bits_lose_nothing(pairs: NativeBackend, cls: type[Linear], columns: int) -> None:
    weight = with_odd_weights(320, columns)
    linear = cls(weight.clone())
    assert linear.native is not None
    assert linear.native.format == BF16_12BIT
    assert torch.equal(linear.weight.view(torch.int16), weight.view(torch.int16))


def test_odd_weights_count(pairs: NativeBackend) -> None:
    weight, rows = with_odd_weights(320, 1024), torch.tensor([0, 5, 33, 319, 5])
    linear, x = Linear(weight), torch.randn(23, 1024).bfloat16()
    assert linear.native is not None
    assert linear.native.offset is not None
    assert int(linear.native.offset[10]) >= 320 * 1024 // 4096
    assert torch.equal(Embedding.tied(weight, linear)(rows).view(torch.int16), weight[rows].view(torch.int16))
    expected = functional.linear(x.double(), weight.double())
    got = linear(x, wide=True)
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-3)
    for count in (1, 2, 4, 5, 12, 13):
        assert torch.equal(linear(x[:count].contiguous(), wide=True), got[:count]), count


def test_weights_of_many_exponents_stay_as_they_are(pairs: NativeBackend) -> None:
    weight = torch.randint(-(2**15), 2**15, (64, 256), dtype=torch.int16).view(torch.bfloat16)
    linear = Linear(weight)
    assert linear.native is not None
    assert linear.native.format == BF16
    assert torch.equal(linear.weight.view(torch.int16), weight.view(torch.int16))


def test_pairs_that_are_no_quads_stay_as_they_are(pairs: NativeBackend) -> None:
    linear = Linear(torch.randn(64, 62).bfloat16())
    assert linear.native is not None
    assert linear.native.format == BF16


def narrow_weights(dtype: torch.dtype, rows: int, columns: int) -> Tensor:
    """float32 that is `dtype` in truth: huge, tiny and below its normal ones too, and zeros of both signs."""
    weight, finfo = torch.randn(rows, columns), torch.finfo(dtype)
    flat, steps = weight.view(-1), torch.arange(rows * columns)
    for value, every in ((finfo.max, 97), (-finfo.tiny, 89), (finfo.tiny / 4, 83), (0.0, 79), (-0.0, 73)):
        flat[steps % every == every // 2] = value
    return weight.to(dtype).float()


@pytest.mark.parametrize("cls", [Linear, GatedLinear])
@pytest.mark.parametrize("kind", [WIDENED_BF16, WIDENED_FP16])
@pytest.mark.parametrize("columns", [2, 62, 640])
def test_narrow_weights_are_held_as_such(native: NativeBackend, cls: type[Linear], kind: int, columns: int) -> None:
    if kind == WIDENED_FP16 and not native.widens_fp16:
        pytest.skip("this CPU does not widen float16")
    weight = narrow_weights({WIDENED_BF16: torch.bfloat16, WIDENED_FP16: torch.float16}[kind], 320, columns)
    linear, rows = cls(weight), torch.tensor([0, 5, 33, 319, 5])
    assert linear.native is not None
    assert linear.native.format == kind
    assert linear.native.num_bytes == 2 * weight.numel()
    assert torch.equal(linear.weight.view(torch.int32), weight.view(torch.int32))
    assert torch.equal(Embedding.tied(weight, Linear(weight))(rows).view(torch.int32), weight[rows].view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_weights_give_the_same_product(
    native: NativeBackend, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, bias = torch.randn(960, 576).to(dtype).float(), torch.randn(960)
    gated, x = torch.randn(320, 576).to(dtype).float(), torch.randn(131, 576)
    narrow, narrow_gated = Linear(weight, bias), GatedLinear(gated)
    monkeypatch.setattr("kernels.linear.pack_widened", lambda *_, **__: None)
    wide, wide_gated = Linear(weight, bias), GatedLinear(gated)
    assert wide.native is not None
    assert wide.native.format == FLOAT32
    for count in (1, 2, 4, 5, 12, 13, 131):
        part = x[:count].contiguous()
        assert torch.equal(narrow(part), wide(part)), count
        assert torch.equal(narrow_gated.activated(part, "silu"), wide_gated.activated(part, "silu")), count


def test_inputs_without_pairs_keep_all_wide(native: NativeBackend) -> None:
    weight = torch.randn(64, 63).bfloat16().float()
    linear = Linear(weight)
    assert linear.native is not None
    assert linear.native.format == FLOAT32
    assert torch.equal(linear.weight, weight)


@pytest.mark.parametrize("value", [1.0 + 2**-12, 1e30 * (1 + 2**-9), float("nan")])
def test_one_wide_weight_keeps_all_wide(native: NativeBackend, value: float) -> None:
    weight = torch.zeros(70, 64)
    weight[69, 63] = value
    linear = Linear(weight)
    assert linear.native is not None
    assert linear.native.format == FLOAT32
    assert torch.equal(linear.weight.view(torch.int32), weight.view(torch.int32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_rows(dtype: torch.dtype) -> None:
    assert Linear(torch.randn(32, 16).to(dtype))(torch.empty(0, 16, dtype=dtype)).shape == (0, 32)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantised_product_is_that_of_quantised_inputs(native: NativeBackend, bits: int, dtype: torch.dtype) -> None:
    weight, x = quantised(torch.randn(70, 192), bits), torch.randn(11, 192).to(dtype)
    linear = Linear(weight, dtype=dtype)
    assert linear.native is not None
    codes, scale, total = native.quantise(x, linear.native)
    numbers = codes.float() - 128 if bits == 8 else codes.view(torch.int8).float()
    grouped = numbers.view(11, -1, weight.group) * scale.unsqueeze(-1)
    torch.testing.assert_close(grouped.sum(-1), total, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(grouped.view(11, 192), x.float(), rtol=0, atol=float(x.abs().max()) / 250)
    expected = grouped.view(11, 192).double() @ weight.dense(torch.float32).double().T
    torch.testing.assert_close(linear(x, wide=True).double(), expected, rtol=1e-5, atol=1e-4)


def test_extremes_are_quantised(native: NativeBackend) -> None:
    """Zeros, a lone outlier, subnormal and huge rows: codes in range, zeros stay zeros."""
    x = torch.zeros(5, 64)
    x[1, 3], x[2], x[3], x[4, ::2] = 1e30, 1e-40, -5.0, 2.0
    linear = Linear(quantised(torch.randn(32, 64), 8), dtype=torch.float32)
    assert linear.native is not None
    codes, scale, _ = native.quantise(x, linear.native)
    assert (codes[0] == 128).all()
    assert codes[1, 3] == 255
    assert (codes[1, :3] == 128).all()
    assert (codes[3] == 1).all()
    assert torch.isfinite(scale).all()
    assert torch.equal(linear(x)[0], torch.zeros(32))


@pytest.mark.parametrize(("bits", "limit"), [(8, 0.008), (4, 0.1)])
def test_rounding_error_of_weights(bits: int, limit: float) -> None:
    weight = torch.randn(64, 256)
    error = (quantised(weight, bits).dense(torch.float32) - weight).norm() / weight.norm()
    assert error < limit


def test_constant_groups_are_exact() -> None:
    weight = torch.full((32, 64), 0.5)
    for bits in (8, 4):
        torch.testing.assert_close(quantised(weight, bits).dense(torch.float32), weight, rtol=1e-3, atol=0)


def small_floats(exponents: Tensor) -> Tensor:
    """MXFP4's values for exponents [rows, blocks of 32], float32 [rows, inputs]."""
    values = torch.tensor(E2M1)[torch.randint(16, (*exponents.shape, 32))]
    return torch.ldexp(values, exponents.unsqueeze(-1)).flatten(1)


def test_small_floats_lose_nothing_in_eight_bits() -> None:
    weight = small_floats(torch.randint(-9, -5, (96, 8)))
    weight[::7] = 0.0
    made = quantised(weight, 8)
    assert torch.equal(made.dense(torch.float32), weight)
    assert (made.scale[::7] == 0).all()


def test_small_floats_far_below_their_neighbours_are_rounded() -> None:
    weight = small_floats(torch.tensor([[-3, -9]]).expand(48, 2))
    error = (quantised(weight, 8).dense(torch.float32) - weight).abs().amax(1)
    assert (error > 0).any()
    assert (error <= weight.abs().amax(1) / 127).all()


@pytest.mark.parametrize("value", [2.0**-27, 2.0**30])
def test_steps_that_float16_cannot_hold_are_not_taken(value: float) -> None:
    weight = torch.full((32, 64), value)
    assert torch.equal(quantised(weight, 8).scale, (weight[:, :1] / 127).clamp(max=65504).half())


def test_other_floats_have_their_largest_at_the_end() -> None:
    weight = torch.randn(64, 128)
    assert (quantised(weight, 8).numbers.view(64, 2, 64).abs().amax(-1) == 127).all()


def test_columns_that_do_not_group_are_left_alone() -> None:
    assert quantise(torch.randn(32, 48), 8) is None
    assert quantise(torch.randn(32, 48), 4) is None


def test_stacked_parts_are_as_one() -> None:
    weight = torch.randn(96, 128)
    parts = [quantised(weight[:32], 4), quantised(weight[32:], 4)]
    assert parts[0].matches(parts[1])
    assert torch.equal(stack(parts).dense(torch.float32), quantised(weight, 4).dense(torch.float32))
    assert not parts[0].matches(quantised(weight, 8))


def test_quantised_weights_without_kernels_are_made_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FOUND, "cpu", plain_backend)
    weight, x = quantised(torch.randn(64, 128), 8), torch.randn(3, 128)
    linear = Linear(weight, dtype=torch.float32)
    assert linear.native is None
    torch.testing.assert_close(linear(x), x @ weight.dense(torch.float32).T, rtol=1e-4, atol=1e-4)


def test_quantised_weights_need_a_dtype() -> None:
    with pytest.raises(ValueError, match="dtype"):
        Linear(quantised(torch.randn(32, 64), 8))


def quantised(weight: Tensor, bits: int) -> QuantisedWeight:
    made = quantise(weight, bits)
    assert made is not None
    return made
