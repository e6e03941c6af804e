from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels import HeadNorms, KVScales
from kernels.gpu.rotary import rotate_and_write
from kernels.plain import reference

pytestmark = pytest.mark.interpret
BLOCKS, LAYERS, LAYER, TOKENS = 9, 3, 1, 7


def inputs(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A projection and the angles [T, head_dim / 2]."""
    return torch.randn(TOKENS, (heads + 2 * kv_heads) * dim).to(dtype), torch.rand(TOKENS, dim // 2) * 100


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("normed", ["", "each head", "all heads"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block"), [(9, 3, 64, 16), (4, 4, 80, 32), (32, 2, 24, 16), (2, 1, 256, 64)]
)
def test_queries_and_cache(
    device: torch.device, heads: int, kv_heads: int, dim: int, block: int, normed: str, dtype: torch.dtype
) -> None:
    qkv, angles = inputs(heads, kv_heads, dim, dtype)
    kv = torch.randn(BLOCKS, LAYERS, kv_heads, block, 2, dim).to(dtype)
    slots = torch.randperm(BLOCKS * block)[:TOKENS]
    q_width, k_width = (heads * dim, kv_heads * dim) if normed == "all heads" else (dim, dim)
    norms = (torch.rand(q_width), torch.rand(k_width)) if normed else (None, None)
    expected_kv = kv.double()
    wide = [None if norm is None else norm.double() for norm in norms]
    expected = reference.rotate_and_write(
        qkv.double(), angles.double().cos(), angles.double().sin(), expected_kv, LAYER, slots,
        q_norm=wide[0], k_norm=wide[1], eps=1e-6,
    )  # fmt: skip
    there = kv.to(device)
    on_device = [None if norm is None else norm.to(device) for norm in norms]
    q = rotate_and_write(
        qkv.to(device), angles.cos().to(device), angles.sin().to(device), there, LAYER, slots.to(device),
        HeadNorms(on_device[0], on_device[1], 1e-6) if normed else None,
    )  # fmt: skip
    tolerance = 2e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(q.cpu().double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(there.cpu().double(), expected_kv, rtol=tolerance, atol=tolerance)


def test_padding_rows_write_nothing(device: torch.device) -> None:
    qkv, angles = inputs(4, 2, 64, torch.float32)
    kv = torch.zeros(BLOCKS, LAYERS, 2, 16, 2, 64, device=device)
    slots = torch.randperm(BLOCKS * 16)[:TOKENS].to(device)
    slots[5:] = -1
    cos, sin = angles.cos().to(device), angles.sin().to(device)
    q = rotate_and_write(qkv.to(device), cos, sin, kv, LAYER, slots, None)
    assert q[:5].isfinite().all() and q[5:].isnan().all()
    written = kv.abs().sum(-1).nonzero()  # block, layer, head, slot, K or V
    assert len(written) == 5 * 2 * 2 and set(written[:, 1].tolist()) == {LAYER}


@pytest.mark.slow
def test_a_slice_of_a_wider_projection(device: torch.device) -> None:
    qkv, angles = inputs(4, 2, 64, torch.float32)
    wide = torch.full((TOKENS, qkv.shape[1] + 8), float("nan"))
    wide[:, : qkv.shape[1]] = qkv
    slots = torch.arange(TOKENS).to(device)
    results = []
    for projection in (qkv.to(device), wide.to(device)[:, : qkv.shape[1]]):
        kv = torch.zeros(BLOCKS, LAYERS, 2, 16, 2, 64, device=device)
        cos, sin = angles.cos().to(device), angles.sin().to(device)
        results.append((rotate_and_write(projection, cos, sin, kv, LAYER, slots, None), kv))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_of_float8(device: torch.device, dtype: torch.dtype) -> None:
    """The cache stores the nearest number to key / k_scale and value / v_scale; too large ones become the largest."""
    qkv, angles = inputs(4, 2, 64, dtype)
    qkv[0, -2:] = torch.tensor([3e4, -3e4])
    slots = torch.randperm(BLOCKS * 16)[:TOKENS]
    plain = torch.zeros(BLOCKS, LAYERS, 2, 16, 2, 64)
    cos, sin = angles.cos(), angles.sin()
    reference.rotate_and_write(qkv.float(), cos, sin, plain, LAYER, slots)
    kv = torch.zeros(plain.shape, dtype=torch.float8_e4m3fn, device=device)
    there = (t.to(device) for t in (qkv, cos, sin))
    rotate_and_write(*there, kv, LAYER, slots.to(device), None, KVScales(0.25, 0.5))
    stored = plain / torch.tensor([0.25, 0.5]).view(2, 1)
    found = kv.cpu().float()
    assert (found.abs() == 448).sum() == 2
    error = (found - stored.clamp(-448, 448)).abs()
    assert (error <= (stored.abs() * 2**-4).clamp(min=2**-10) * 1.0001).all()


def test_nothing(device: torch.device) -> None:
    kv = torch.zeros(1, 1, 1, 16, 2, 32, device=device)
    empty = torch.empty(0, 16, device=device)
    slots = torch.empty(0, dtype=torch.int64, device=device)
    q = rotate_and_write(torch.empty(0, 5 * 32, device=device), empty, empty, kv, 0, slots, None)
    assert q.shape == (0, 3, 32) and not kv.any()


@pytest.mark.slow
def test_rounding_to_e4m3(device: torch.device) -> None:
    """Every e4m3 number, every border between two neighbours and what lies just beside it: as torch rounds."""
    kinds = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middle = (kinds[1:] + kinds[:-1]) / 2
    beside = torch.nextafter(middle, torch.zeros(())), torch.nextafter(middle, torch.full((), 500.0))
    numbers = torch.cat((kinds, middle, *beside))
    numbers = torch.nn.functional.pad(torch.cat((numbers, -numbers)), (0, -2 * len(numbers) % 64)).view(-1, 64)
    tokens = len(numbers)
    kv = torch.zeros(1, 1, 1, tokens, 2, 64, dtype=torch.float8_e4m3fn, device=device)
    qkv = torch.cat((numbers, numbers, numbers), 1).to(device)  # one head, unrotated
    cos, sin = torch.ones(tokens, 32, device=device), torch.zeros(tokens, 32, device=device)
    rotate_and_write(qkv, cos, sin, kv, 0, torch.arange(tokens, device=device), None)
    expected = numbers.to(torch.float8_e4m3fn).float()
    assert torch.equal(kv.cpu()[0, 0, 0, :, 1].float(), expected)
    assert torch.equal(kv.cpu()[0, 0, 0, :, 0].float(), expected)
