"""Mixture-of-experts products: rows are sorted by expert, and each tile multiplies rows of one expert by its weights.

Weights are floats, or quantised and widened in registers as in `held_linear`.

No synchronisation with the host is needed: the grid is large enough for every distribution of rows among experts, and
programs look up their expert.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.tiles import add_dense_product, add_held_product, gated, rounded
from kernels.interface import HeldWeight

BLOCK_N, BLOCK_K = 64, 64
"""Outputs and inputs of a tile."""
FEW_ROWS, MANY_ROWS = 16, 64
"""Rows of a tile. FEW_ROWS is the minimum of tensor cores, used if most experts have few rows. MANY_ROWS reads weights
less often. Batch-invariant products always use MANY_ROWS, because Hopper uses other instructions for 16 rows."""
BLOCK = 1024
"""Elements per program of an element-wise step."""


@triton.jit
def pairs_of_tile(
    ends, num_pairs, i_tile, EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr
):  # fmt: skip
    """Return the expert of a tile, or EXPERTS if there is no such tile, and the first and end of its pairs."""
    o_e = tl.arange(0, BLOCK_E)
    b_end = tl.load(ends + o_e, mask=o_e < EXPERTS, other=num_pairs)
    b_begin = tl.load(ends + o_e - 1, mask=(o_e > 0) & (o_e <= EXPERTS), other=0)
    b_tiles = tl.where(o_e < EXPERTS, (b_end - b_begin + BLOCK_M - 1) // BLOCK_M, 0)
    b_until = tl.cumsum(b_tiles, 0)
    i_expert = tl.sum((b_until <= i_tile).to(tl.int32), 0)
    m_e = o_e == i_expert
    i_first = tl.sum(tl.where(m_e, b_begin + (i_tile - b_until + b_tiles) * BLOCK_M, 0), 0)
    return i_expert, i_first, tl.sum(tl.where(m_e, b_end, 0), 0)


@triton.jit(do_not_specialize=["num_pairs"])
def multiply_grouped(
    x, weights, scale, offset, bias, out, order, ends, num_pairs,
    EXPERTS: tl.constexpr, PER_TOKEN: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    GATHER: tl.constexpr, BIAS: tl.constexpr,
    GROUP: tl.constexpr, PACKED: tl.constexpr, FLOATS: tl.constexpr, OFFSET: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program (tile, columns): up to BLOCK_M pairs of one expert by BLOCK_N rows of its weights [EXPERTS, N, K].

    ends [EXPERTS]: end of each expert's pairs in `order`. With GATHER, inputs are the rows of the pairs and outputs are
    written in sorted order. Otherwise, inputs are in sorted order and outputs in order of pair number. GROUP > 0:
    weights are the numbers of a `HeldWeight`.
    """
    i_tile, i_col = tl.program_id(0), tl.program_id(1)
    i_expert, i_first, i_end = pairs_of_tile(ends, num_pairs, i_tile, EXPERTS, BLOCK_E, BLOCK_M)
    if i_expert < EXPERTS:
        o_place = i_first + tl.arange(0, BLOCK_M)
        m_row = o_place < i_end
        o_pair = tl.load(order + o_place, mask=m_row, other=0)
        o_in = o_pair // PER_TOKEN if GATHER else o_place
        o_out = o_place if GATHER else o_pair
        o_n = i_col * BLOCK_N + tl.arange(0, BLOCK_N)
        o_k = tl.arange(0, BLOCK_K)
        p_x = x + o_in.to(tl.int64)[:, None] * K
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        if GROUP:
            STORED: tl.constexpr = K // 2 if PACKED else K
            numbers = weights + i_expert.to(tl.int64) * N * STORED
            factors = scale + i_expert.to(tl.int64) * (K // GROUP) * N
            terms = offset + i_expert.to(tl.int64) * (K // GROUP) * N if OFFSET else offset
            for k in range(0, STORED, BLOCK_K):
                acc = add_held_product(
                    acc, p_x, m_row[:, None], numbers, factors, terms, o_n, k + o_k, N, K, GROUP, PACKED, FLOATS, OFFSET
                )
        else:
            dense = weights + i_expert.to(tl.int64) * N * K
            for k in range(0, K, BLOCK_K):
                acc = add_dense_product(acc, p_x, m_row[:, None], dense, o_n, k + o_k, N, K)
        if BIAS:
            b_bias = tl.load(bias + i_expert * N + o_n, mask=o_n < N, other=0.0)
            acc += b_bias.to(tl.float32)[None, :]
        m = m_row[:, None] & (o_n < N)[None, :]
        tl.store(out + o_out.to(tl.int64)[:, None] * N + o_n[None, :], rounded(acc, out.dtype.element_ty), mask=m)


@triton.jit
def combine_pairs(made, shares, out, PER_TOKEN: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Program (row, columns) sums a row's pairs, weighted by their shares, in order and in float32."""
    i_row = tl.program_id(0).to(tl.int64)
    o_col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m = o_col < WIDTH
    acc = tl.zeros((BLOCK,), dtype=tl.float32)
    for j in range(PER_TOKEN):
        b_made = tl.load(made + (i_row * PER_TOKEN + j) * WIDTH + o_col, mask=m, other=0.0).to(tl.float32)
        acc += b_made * tl.load(shares + i_row * PER_TOKEN + j)
    tl.store(out + i_row * WIDTH + o_col, rounded(acc, out.dtype.element_ty), mask=m)


def experts(
    x: Tensor,
    chosen: Tensor,
    shares: Tensor,
    gate_up: Tensor | HeldWeight,
    down: Tensor | HeldWeight,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
    batch_invariant: bool = False,
) -> Tensor:
    """As `HeldProducts.experts`."""
    num_experts, per_token, width = len(_numbers(gate_up)), chosen.shape[1], down.shape[-2]
    out = torch.empty((x.shape[0], width), dtype=x.dtype, device=x.device)
    if not x.shape[0]:
        return out
    ranked, order = chosen.flatten().sort(stable=True)
    numbers = torch.arange(num_experts, device=x.device)
    ends = torch.searchsorted(ranked, numbers, right=True, out_int32=True)
    order = order.int()
    block_m = MANY_ROWS if batch_invariant else rows_of_tile(order.shape[0], num_experts)
    inner = _multiply(x.contiguous(), gate_up, gate_up_bias, order, ends, per_token, block_m, gather=True)
    made = _multiply(gated(inner, activation), down, down_bias, order, ends, per_token, block_m, gather=False)
    combine_pairs[(x.shape[0], triton.cdiv(width, BLOCK))](
        made, shares.contiguous(), out, PER_TOKEN=per_token, WIDTH=width, BLOCK=BLOCK, num_warps=4,
        enable_fp_fusion=False,
    )  # fmt: skip
    return out


def _multiply(
    x: Tensor,
    weights: Tensor | HeldWeight,
    bias: Tensor | None,
    order: Tensor,
    ends: Tensor,
    per_token: int,
    block_m: int,
    *,
    gather: bool,
) -> Tensor:
    """x by the weights [experts, n, k] of its pairs' experts: [pairs, n]; see `multiply_grouped`."""
    numbers, (n, k) = _numbers(weights), weights.shape[-2:]
    held = weights if isinstance(weights, HeldWeight) else None
    count, pairs = len(numbers), order.shape[0]
    out = torch.empty((pairs, n), dtype=x.dtype, device=x.device)
    grid = (min(pairs, count) + pairs // block_m, triton.cdiv(n, BLOCK_N))
    multiply_grouped[grid](
        x, numbers, held and held.scale, held and held.offset, bias, out, order, ends, pairs,
        EXPERTS=count, PER_TOKEN=per_token, N=n, K=k, GATHER=gather, BIAS=bias is not None,
        GROUP=held.group if held else 0, PACKED=held is not None and held.packed,
        FLOATS=held is not None and held.floats, OFFSET=held is not None and held.offset is not None,
        BLOCK_E=triton.next_power_of_2(count), BLOCK_M=block_m, BLOCK_N=BLOCK_N,
        BLOCK_K=BLOCK_K // 2 if held and held.packed else BLOCK_K,
        num_warps=4, num_stages=3, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def _numbers(weights: Tensor | HeldWeight) -> Tensor:
    """One of each weight, or of each two: [experts, n, ..]."""
    return weights.numbers if isinstance(weights, HeldWeight) else weights


def rows_of_tile(pairs: int, num_experts: int) -> int:
    return MANY_ROWS if pairs > FEW_ROWS * num_experts else FEW_ROWS
