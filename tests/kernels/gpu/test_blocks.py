from __future__ import annotations

import pytest
import torch

from kernels.blocks import wire_bytes
from kernels.gpu import blocks
from kernels.plain import blocks as plain

pytestmark = pytest.mark.interpret
SHAPES = [(2, 1, 16, 2, 64), (1, 3, 16, 2, 80), (1, 1, 24, 2, 24), (1, 1, 64, 2, 128)]  # of one block


def cache(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """7 blocks, whose heads differ in size by powers of ten; some heads hold nothing but zeros."""
    kv = torch.randn(7, *shape) * 10.0 ** torch.randint(-6, 4, (7, *shape[:2], 1, 2, 1))
    kv[3, :, :, :, 1] = 0.0
    return kv.to(dtype)


@pytest.mark.quick_cover(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_as_they_are(device: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    kv, ids = cache(shape, dtype), torch.tensor([5, 0, 3])
    buffer = torch.full((3, wire_bytes(kv)), 0xFF, dtype=torch.uint8, device=device)
    blocks.gather_blocks(kv.to(device), ids.to(device), buffer, False)
    expected = torch.empty_like(buffer, device="cpu")
    plain.gather_blocks(kv, ids, expected, False)
    assert torch.equal(buffer.cpu(), expected)
    assert torch.equal(expected, kv[ids].flatten(1).view(torch.uint8))
    other = torch.zeros_like(kv, device=device)
    blocks.scatter_blocks(buffer, other, torch.tensor([1, 6, 2], device=device), False)
    assert torch.equal(other[[1, 6, 2]].cpu().float(), kv[ids].float()) and not other[[0, 3, 4, 5]].float().any()


@pytest.mark.slow_except("shape2-*")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_quantised_blocks(device: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    kv, ids = cache(shape, dtype), torch.tensor([5, 0, 3])
    buffer = torch.full((3, wire_bytes(kv, quantised=True)), 0xFF, dtype=torch.uint8, device=device)
    blocks.gather_blocks(kv.to(device), ids.to(device), buffer, True)
    expected = torch.empty_like(buffer, device="cpu")
    plain.gather_blocks(kv, ids, expected, True)
    assert torch.equal(buffer.cpu(), expected)
    there, back = torch.zeros_like(kv, device=device), torch.zeros_like(kv)
    blocks.scatter_blocks(buffer, there, ids.to(device), True)
    plain.scatter_blocks(expected, back, ids, True)
    assert torch.equal(there.cpu(), back)


def test_nothing(device: torch.device) -> None:
    kv = torch.ones(2, 1, 1, 16, 2, 32, device=device)
    ids = torch.empty(0, dtype=torch.int64, device=device)
    buffer = torch.empty(0, wire_bytes(kv), dtype=torch.uint8, device=device)
    blocks.gather_blocks(kv, ids, buffer, False)
    blocks.scatter_blocks(buffer, kv, ids, False)
    assert (kv == 1).all()


@pytest.mark.quick_cover(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [*SHAPES, (3, 2, 32, 2, 128)])
def test_sums(device: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    kv, ids = cache(shape, dtype), torch.tensor([5, 0, 3, 5])
    found, expected = torch.empty(4, dtype=torch.int64, device=device), torch.empty(4, dtype=torch.int64)
    blocks.block_sums(kv.to(device), ids.to(device), found)
    plain.block_sums(kv, ids, expected)
    assert torch.equal(found.cpu(), expected) and len(set(expected.tolist())) == 3
    blocks.block_sums(kv.to(device), ids[:0].to(device), found[:0])
