"""Memory layout of the keys and values of one block, layer and head in a KV cache.

A cache is [num_blocks, num_layers, num_kv_heads, block_size, 2 (K, V), width]. A cache of latents has 1 instead of 2,
because a value is the first part of its key, and is never int8. The width is head_dim, plus four bytes for scales in an
int8 cache. In an int8 cache, the last three dimensions form one range of bytes:

    int8 [block_size][K|V][head_dim], float32 scales [K|V][block_size]

An element's value is its int8 times the scale of its key or value. This keeps the elements contiguous for vector loads.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCALE_BYTES = 4
LARGEST_FP8 = 448.0
LARGEST_INT8 = 127.0
"""Largest magnitudes of float8_e4m3fn and of symmetric int8."""
LEAST_SCALE = 2.0**-100
"""Minimum scale in a transfer buffer: see `kernels.blocks`."""


def row_width(head_dim: int, dtype: torch.dtype) -> int:
    """The last dimension of a cache's tensor."""
    return head_dim + (SCALE_BYTES if dtype == torch.int8 else 0)


def head_dim_of(kv: Tensor) -> int:
    """Return the number of elements of a key."""
    return kv.shape[5] - (SCALE_BYTES if kv.dtype == torch.int8 else 0)


def numbers_of(kv: Tensor) -> Tensor:
    """A view [..., block_size, 2, head_dim] of a cache of int8 [..., block_size, 2, width]."""
    size, _, width = kv.shape[-3:]
    dim = width - SCALE_BYTES
    return kv.flatten(-3)[..., : size * 2 * dim].view(*kv.shape[:-3], size, 2, dim)


def scales_of(kv: Tensor) -> Tensor:
    """A view float32 [..., 2, block_size] of a cache of int8."""
    size, _, width = kv.shape[-3:]
    return kv.flatten(-3)[..., size * 2 * (width - SCALE_BYTES) :].view(torch.float32).view(*kv.shape[:-3], 2, size)


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise float32 [..., head_dim] to int8 with scales float32 [...]. A scale is NaN if its row is not finite."""
    peak = x.abs().amax(-1)
    inverse = torch.where(peak > 0, LARGEST_INT8 / peak, torch.zeros_like(peak))
    numbers = torch.round(x * inverse[..., None]).nan_to_num(0.0).to(torch.int8)
    return numbers, peak / LARGEST_INT8 + (x - x).sum(-1)


def saturated(x: Tensor) -> Tensor:
    """Convert float32 to e4m3 with saturation, which torch does not do."""
    return x.clamp(-LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn)


def packed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert float32 [..., block_size, 2, head_dim] to the cache layout of `dtype`."""
    if dtype != torch.int8:
        return saturated(x) if dtype == torch.float8_e4m3fn else x.to(dtype)
    kv = torch.empty(*x.shape[:-1], row_width(x.shape[-1], dtype), dtype=dtype, device=x.device)
    numbers, scales = quantised(x)
    numbers_of(kv).copy_(numbers)
    scales_of(kv).copy_(scales.transpose(-1, -2))
    return kv


def unpacked(kv: Tensor) -> Tensor:
    """Convert (part of) an 8-bit cache to float32 [..., block_size, 2, head_dim]. Returns other types unchanged."""
    if kv.dtype == torch.int8:
        return numbers_of(kv).float() * scales_of(kv).transpose(-1, -2)[..., None]
    return kv.float() if kv.dtype == torch.float8_e4m3fn else kv
