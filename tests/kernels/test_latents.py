"""Attention over latents, what writes them, and the products of heads: every CPU backend against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import HeadLinear, Kernels, LatentNorm, QuerySpan, gather_blocks, scatter_blocks, wire_bytes
from kernels.backends import FOUND
from kernels.plain import backend as torch_backend
from kernels.plain import reference

SPANS = [(1, 0), (7, 0), (1, 130), (40, 61), (1, 16), (5, 300)]
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 3e-2}
SIZES = [(4, 48, 32, 16), (16, 576, 512, 64), (3, 40, 24, 32), (24, 80, 64, 16)]
"""Heads, numbers of a key, those that are its value, block size: DeepSeek's second, one that no vector fits third."""


def difference(case: Any, out: Tensor, **scales: float) -> float:
    expected = reference.paged_attention(
        case.q.double(),
        case.kv,
        1,
        case.spans,
        scale=case.layout.head_dim**-0.5,
        latent_dim=case.layout.latent_dim,
        **scales,
    )
    assert out.shape == expected.shape
    return float((out.double() - expected).abs().max())


@pytest.mark.quick_cover(2)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("heads", "dim", "latent_dim", "block"), SIZES)
def test_attention(
    make_case: Any, each_backend: Any, dtype: torch.dtype, heads: int, dim: int, latent_dim: int, block: int
) -> None:
    spans = SPANS[:4] if dim > 100 else SPANS
    case = make_case(spans, heads=heads, kv_heads=1, dim=dim, block=block, dtype=dtype, latent_dim=latent_dim, layers=3)
    assert difference(case, case.run(each_backend)) < TOLERANCE[dtype]


def test_attention_over_float8(make_case: Any, each_backend: Any) -> None:
    case = make_case(SPANS[:4], heads=16, kv_heads=1, dim=80, latent_dim=64, dtype=torch.bfloat16)
    case.kv = case.kv.to(torch.float8_e4m3fn)
    assert difference(case, case.run(each_backend)) < 3e-2
    scales = {"k_scale": 1.6, "v_scale": 0.7}
    assert difference(case, case.run(each_backend, **scales), **scales) < 3e-2


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_row_is_the_same_in_every_batch(make_case: Any, native: Kernels, dtype: torch.dtype) -> None:
    """Bit for bit: alone or among others, in a chunk of any length, with as many threads as there are groups."""
    case = make_case([(1, 0), (30, 41), (1, 100)], heads=32, kv_heads=1, dim=80, latent_dim=64, dtype=dtype)
    together, spans = case.run(native), case.spans
    for row, start, table in [(0, 0, 0), (1 + 17, 41 + 17, 1), (31, 100, 2)]:
        case.spans = [QuerySpan(row, 1, start, spans[table].block_table)]
        assert torch.equal(case.run(native)[row], together[row])
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        case.spans = spans
        assert torch.equal(case.run(native), together)
    finally:
        torch.set_num_threads(before)


@pytest.mark.quick_cover(2)
@pytest.mark.parametrize(("rank", "rope"), [(32, 16), (512, 64), (24, 10)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kept", "scale"), [("same", 1.0), ("float8", 1.0), ("float8", 0.3)])
def test_writing(each_backend: Any, rank: int, rope: int, dtype: torch.dtype, kept: str, scale: float) -> None:
    tokens, heads, nope = 5, 3, 20
    cache = dtype if kept == "same" else torch.float8_e4m3fn
    kv = torch.full((4, 2, 1, 16, 1, rank + rope), float("nan")).to(cache)
    q, absorbed = torch.randn(tokens, heads * (nope + rope)).to(dtype), torch.randn(tokens, heads * rank).to(dtype)
    latents, weight = torch.randn(tokens, rank + rope).to(dtype) * 3, torch.rand(rank) + 0.5
    angles, slots = torch.rand(tokens, rope // 2) * 6, torch.tensor([3, 17, 18, 63, 0])
    inputs = (q, absorbed, latents, angles.cos(), angles.sin())
    found = each_backend.write_latents(*inputs, kv, 1, slots, LatentNorm(weight, 1e-6), scale)
    wide = torch.full(kv.shape, float("nan"), dtype=torch.float64)
    expected = reference.write_latents(*(x.double() for x in inputs), wide, 1, slots, weight, 1e-6)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    tolerance = 0.07 if kept == "float8" else tolerance
    torch.testing.assert_close(kv.double() * scale, wide, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(64, 20), (20, 64), (33, 7)])
def test_products_of_heads(
    monkeypatch: pytest.MonkeyPatch, backend: str, dtype: torch.dtype, sizes: tuple[int, int]
) -> None:
    """Of the first numbers of each head's; rows alone and among 200 others have the same bits."""
    if backend == "torch":
        monkeypatch.setitem(FOUND, "cpu", torch_backend)
    outputs, inputs = sizes
    weight, x = torch.randn(3, outputs, inputs).to(dtype), torch.randn(201, 3, inputs + 6).to(dtype)
    product = HeadLinear(weight)
    found = product(x.flatten(1))
    expected = torch.einsum("thi,hoi->tho", x[..., :inputs].double(), weight.double()).flatten(1)
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    if all(head.packed for head in product.heads):
        assert torch.equal(product(x[170:171].flatten(1)), found[170:171])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_on_the_wire_in_8_bits(dtype: torch.dtype) -> None:
    """One scale for each layer of a block."""
    kv = torch.randn(5, 3, 1, 16, 1, 80).to(dtype)
    assert wire_bytes(kv, quantised=True) == -(-(3 * 16 * 80 + 3 * 4) // 16) * 16
    ids, other = torch.tensor([4, 1]), torch.zeros_like(kv)
    scatter_blocks(gather_blocks(kv, ids, quantised=True), other, ids, quantised=True)
    torch.testing.assert_close(other[ids].float(), kv[ids].float(), rtol=0.07, atol=0.01)
    assert not other[[0, 2, 3]].any()
