"""Adapters' low-rank changes: rows sorted by adapter, tiles of one adapter's rows by its A, then by its B.

Rows without adapter belong to no tile: nothing of them is read or written. Nothing waits for the host, so a graph may
hold both products, and replay them with other adapters.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.products.experts import MANY_ROWS, multiply_grouped, pairs_of_tile, rows_of_tile
from kernels.gpu.tiles import product, rounded
from kernels.interface import GroupedRows, LoraStack

BLOCK_N, BLOCK_K = 64, 64
"""Outputs and inputs of a tile."""


@triton.jit(do_not_specialize=["num_rows"])
def expand_grouped(
    low, weights, out, order, ends, num_rows,
    LORAS: tl.constexpr, N: tl.constexpr, RANK: tl.constexpr, PARTS: tl.constexpr,
    SECOND: tl.constexpr, THIRD: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Program (tile, columns): adds up to BLOCK_M rows of one adapter, by BLOCK_N rows of its B [LORAS, N, RANK].

    low [num_rows, PARTS * RANK] is in the order of `order`, out [num_rows, N] is not. The second and third part start
    at outputs SECOND and THIRD. Column tiles do not cross parts.
    """
    i_tile, i_col = tl.program_id(0), tl.program_id(1)
    i_lora, i_first, i_end = pairs_of_tile(ends, num_rows, i_tile, LORAS, BLOCK_L, BLOCK_M)
    if i_lora < LORAS:
        o_place = i_first + tl.arange(0, BLOCK_M)
        m_row = o_place < i_end
        o_row = tl.load(order + o_place, mask=m_row, other=0).to(tl.int64)
        o_n, o_r = i_col * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_R)
        i_part = (i_col * BLOCK_N >= SECOND).to(tl.int32) + (i_col * BLOCK_N >= THIRD).to(tl.int32)
        p_low = low + o_place.to(tl.int64)[:, None] * (PARTS * RANK) + i_part * RANK + o_r[None, :]
        p_w = weights + i_lora.to(tl.int64) * N * RANK + o_n[None, :] * RANK + o_r[:, None]
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for r in range(0, RANK, BLOCK_R):
            m_r = r + o_r < RANK
            b_low = tl.load(p_low + r, mask=m_row[:, None] & m_r[None, :], other=0.0)
            b_w = tl.load(p_w + r, mask=m_r[:, None] & (o_n < N)[None, :], other=0.0)
            acc = product(b_low, b_w, acc)
        m = m_row[:, None] & (o_n < N)[None, :]
        p_out = out + o_row[:, None] * N + o_n[None, :]
        acc += tl.load(p_out, mask=m, other=0.0).to(tl.float32)
        tl.store(p_out, rounded(acc, out.dtype.element_ty), mask=m)


def add_lora(x: Tensor, y: Tensor, stack: LoraStack, rows: GroupedRows, *, batch_invariant: bool = False) -> None:
    """As `HeldProducts.add_lora`. What lies between the products is rounded to the type of x."""
    count, ranks, width = stack.a.shape
    num_rows, outputs, rank = x.shape[0], stack.b.shape[1], stack.max_rank
    if not num_rows:
        return
    low = torch.empty((num_rows, ranks), dtype=x.dtype, device=x.device)
    block_m = MANY_ROWS if batch_invariant else rows_of_tile(num_rows, count)
    tiles = min(num_rows, count) + num_rows // block_m
    groups = triton.next_power_of_2(count)
    multiply_grouped[(tiles, triton.cdiv(ranks, BLOCK_N))](
        x, stack.a, None, None, None, low, rows.order, rows.ends, num_rows,
        EXPERTS=count, PER_TOKEN=1, N=ranks, K=width, GATHER=True, BIAS=False,
        GROUP=0, PACKED=False, FLOATS=False, OFFSET=False,
        BLOCK_E=groups, BLOCK_M=block_m, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K,
        num_warps=4, num_stages=3, enable_fp_fusion=False,
    )  # fmt: skip
    begins = [sum(stack.parts[:i]) for i in range(1, len(stack.parts))]
    second, third = (*begins, outputs, outputs)[:2]
    block_n = columns_of_tile(begins)
    expand_grouped[(tiles, triton.cdiv(outputs, block_n))](
        low, stack.b, y, rows.order, rows.ends, num_rows,
        LORAS=count, N=outputs, RANK=rank, PARTS=len(stack.parts), SECOND=second, THIRD=third,
        BLOCK_L=groups, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_R=max(16, min(64, triton.next_power_of_2(rank))),
        num_warps=4, num_stages=2, enable_fp_fusion=False,
    )  # fmt: skip


def columns_of_tile(begins: list[int]) -> int:
    """Return the largest tile width for which tiles do not cross parts."""
    return min(BLOCK_N, math.gcd(*begins) & -math.gcd(*begins)) if begins else BLOCK_N
