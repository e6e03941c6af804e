"""The rows of a KV cache: one key or one value of one head.

A cache is [num_blocks, num_layers, num_kv_heads, block_size, 2 (K, V), row]. A row is head_dim numbers, and in a cache
of int8 eight bytes more: the float32 that multiplies these numbers, and four zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCALE_BYTES = 4
TAIL = 8
LARGEST_FP8 = 448.0
LARGEST_INT8 = 127.0


def row_width(head_dim: int, dtype: torch.dtype) -> int:
    """Numbers of a row, what is behind them included."""
    return head_dim + (TAIL if dtype == torch.int8 else 0)


def head_dim_of(kv: Tensor) -> int:
    """Numbers of a key."""
    return kv.shape[5] - (TAIL if kv.dtype == torch.int8 else 0)


def packed_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 [..., head_dim] as rows of a cache: [..., row_width]. NaN stays NaN, and in int8 takes its row along."""
    if dtype == torch.int8:
        peak = x.abs().amax(-1, keepdim=True)
        scale = peak / LARGEST_INT8 + (x - x).sum(-1, keepdim=True)
        inverse = torch.where(peak > 0, LARGEST_INT8 / peak, torch.zeros_like(peak))
        codes = torch.round(x * inverse).nan_to_num(0.0).to(torch.int8)
        padding = codes.new_zeros(*codes.shape[:-1], TAIL - SCALE_BYTES)
        return torch.cat((codes, scale.contiguous().view(torch.int8), padding), dim=-1)
    if dtype == torch.float8_e4m3fn:  # which torch does not saturate
        return x.clamp(-LARGEST_FP8, LARGEST_FP8).to(dtype)
    return x.to(dtype)


def unpacked_rows(rows: Tensor) -> Tensor:
    """Rows of a cache as what they stand for: float32 [..., head_dim] of int8 and e4m3, others as they are."""
    if rows.dtype == torch.float8_e4m3fn:
        return rows.float()
    if rows.dtype != torch.int8:
        return rows
    dim = rows.shape[-1] - TAIL
    return rows[..., :dim].float() * rows[..., dim : dim + SCALE_BYTES].contiguous().view(torch.float32)
