"""Products with weights of 4 to 6 bits, whose scales may be steps of a factor."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels import GatedLinear, Linear, QuantisedWeight
from kernels.cpu.backend import NativeBackend, native_backend
from kernels.cpu.packed import NIBBLES
from kernels.plain import reference

DTYPES = [torch.float32, torch.bfloat16]
FORMS = list(NIBBLES)
Form = tuple[int, bool, bool]
"""Bits, whether scales have steps, whether offsets have steps of their own."""


@pytest.fixture
def native() -> NativeBackend:
    return native_backend() or pytest.skip("no C++ compiler here")


def drawn(form: Form, rows: int, columns: int) -> QuantisedWeight:
    """Every number and step that the format has, around zero."""
    bits, stepped, own_steps = form
    group, source = 16 if bits == 6 else 32, torch.Generator().manual_seed(bits)
    numbers = torch.randint(0, 2**bits, (rows, columns), generator=source, dtype=torch.int8)
    width = columns // (256 if stepped else group)
    scale = (torch.rand(rows, width, generator=source) * 1e-3 + 1e-3).half()
    offset = scale * -(2 ** (bits - 1))
    if not stepped:
        return QuantisedWeight(bits, group, numbers, scale, offset)
    low = -128 if bits == 6 else 0
    steps = torch.randint(low, -low or 64, (rows, columns // group), generator=source, dtype=torch.int8)
    if not own_steps:
        return QuantisedWeight(bits, group, numbers, scale, offset, steps)
    others = torch.randint(low, -low or 64, steps.shape, generator=source, dtype=torch.int8)
    return QuantisedWeight(bits, group, numbers, scale, offset, steps, others)


def error_of(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.quick_cover(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("rows", "columns"), [(96, 512), (61, 256), (7, 1024)])
def test_a_product_is_that_of_the_floats(form: Form, dtype: torch.dtype, rows: int, columns: int) -> None:
    weight, bias = drawn(form, rows, columns), torch.randn(rows).to(dtype)
    linear, x = Linear(weight, bias, dtype=dtype), torch.randn(9, columns).to(dtype)
    assert torch.equal(linear.weight, weight.dense(dtype))
    expected = x.double() @ weight.dense(torch.float32).double().T + bias.double()
    assert error_of(linear(x), expected) < 0.01  # inputs are rounded to 8 bits


@pytest.mark.parametrize("form", FORMS)
def test_a_gated_product(form: Form) -> None:
    weight, x = drawn(form, 256, 512), torch.randn(5, 512)
    linear = GatedLinear(weight, dtype=torch.float32)
    assert torch.equal(linear.weight, weight.dense(torch.float32))
    expected = reference.gated(x.double() @ weight.dense(torch.float32).double().T, "silu")
    assert error_of(linear.activated(x, "silu"), expected) < 0.03


@pytest.mark.parametrize("form", FORMS)
def test_a_row_is_the_same_in_every_batch(native: NativeBackend, form: Form) -> None:
    linear, x = Linear(drawn(form, 416, 512), dtype=torch.bfloat16), torch.randn(99, 512).bfloat16()
    assert linear.native is not None and linear.native.format == NIBBLES[form]
    everything = linear(x)
    for count in (1, 2, 3, 4, 5, 6, 7, 31, 98):
        assert torch.equal(linear(x[:count].contiguous()), everything[:count]), count


def test_an_offset_without_steps_is_the_middle(native: NativeBackend) -> None:
    weight = drawn((6, True, False), 32, 256)
    with pytest.raises(ValueError, match="an offset without steps is -32 scales"):
        Linear(QuantisedWeight(6, 16, weight.numbers, weight.scale, weight.scale, weight.steps), dtype=torch.float32)
