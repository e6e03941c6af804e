from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels import HeadNorms
from kernels.plain import reference

DTYPES = [torch.float32, torch.bfloat16]


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """To a few units in the last place of what is stored."""
    tolerance = 3e-6 if found.dtype == torch.float32 else 2**-7
    torch.testing.assert_close(found.double(), expected.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.quick_cover(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (3, 576), (500, 640), (2, 24)])
def test_norm(each_backend: Any, rows: int, width: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(rows, width).to(dtype) * 3, torch.rand(width) + 0.5
    close(each_backend.rms_norm(x, weight, 1e-5), reference.rms_norm(x.double(), weight.double(), 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [24, 576])
def test_sum_and_norm(each_backend: Any, width: int, dtype: torch.dtype) -> None:
    x, delta, weight = torch.randn(7, width).to(dtype), torch.randn(7, width).to(dtype), torch.rand(width)
    total, normed = each_backend.add_rms_norm(x, delta, weight, 1e-6)
    assert torch.equal(total, x + delta)
    close(normed, reference.rms_norm(total.double(), weight.double(), 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("width", [24, 160])
def test_gated(each_backend: Any, activation: str, width: int, dtype: torch.dtype) -> None:
    x = torch.randn(33, 2 * width).to(dtype) * 4
    x[0, :4] = torch.tensor([-300.0, 300.0, -30.0, 0.0])
    expected = reference.gated(x.double(), activation)
    torch.testing.assert_close(each_backend.gated(x, activation).double(), expected, rtol=0.02, atol=1e-5) \
        if dtype == torch.bfloat16 else close(each_backend.gated(x, activation), expected)  # fmt: skip


@pytest.mark.quick_cover(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", ["", "each head", "all heads"])
@pytest.mark.parametrize(("dim", "block"), [(24, 16), (64, 16), (256, 64)])
def test_rotate_and_write(each_backend: Any, dim: int, block: int, normed: str, dtype: torch.dtype) -> None:
    heads, kv_heads, tokens, layer = 6, 2, 37, 1
    q_width, k_width = (heads * dim, kv_heads * dim) if normed == "all heads" else (dim, dim)
    kv = torch.randn(9, 3, kv_heads, block, 2, dim).to(dtype)
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim).to(dtype)
    angles = torch.rand(tokens, dim // 2) * 100
    slots = torch.randperm(9 * block)[:tokens]
    made = {"q_norm": torch.rand(q_width), "k_norm": torch.rand(k_width)}
    weights = made if normed else dict.fromkeys(made)
    expected_kv = kv.double()
    wide = {name: None if weight is None else weight.double() for name, weight in weights.items()}
    expected = reference.rotate_and_write(
        qkv.double(), angles.double().cos(), angles.double().sin(), expected_kv, layer, slots, eps=1e-6, **wide
    )
    norms = HeadNorms(weights["q_norm"], weights["k_norm"], 1e-6) if normed else None
    q = each_backend.rotate_and_write(qkv, angles.cos(), angles.sin(), kv, layer, slots, norms)
    if dtype == torch.float32:
        torch.testing.assert_close(q.double(), expected, rtol=1e-5, atol=2e-5)
        torch.testing.assert_close(kv.double(), expected_kv, rtol=1e-5, atol=2e-5)
    else:
        torch.testing.assert_close(q.double(), expected, rtol=0.02, atol=0.02)
        torch.testing.assert_close(kv.double(), expected_kv, rtol=0.02, atol=0.02)


def test_bfloat16_rounds_to_nearest_even(native: Any) -> None:
    """x * 1 through the norm kernel's store: the same bits as torch's conversion, ties included."""
    bits = torch.arange(0x3F800000, 0x3F900000, 0x1001, dtype=torch.int32)[:160]
    ties = torch.tensor([0x3F808000, 0x3F818000], dtype=torch.int32).repeat(8)
    x = torch.cat((bits, ties)).view(torch.float32)
    wide = x.repeat(2, 1)
    delta = torch.zeros_like(wide)
    total, _ = native.add_rms_norm(wide.bfloat16(), delta.bfloat16(), torch.ones(wide.shape[1]), 1e-6)
    assert torch.equal(total, wide.bfloat16())
