"""Products with quantised weights that are widened in registers, which reduces memory traffic for few rows.

    y [rows, out] = x [rows, in] W^T        W = scale * numbers + offset, rounded to the type of x

If there are too few outputs to keep all multiprocessors busy, the inputs are divided into SPLITS parts, which are added
in order. The number of parts depends only on the shape of W, so a row's sum has the same terms in every batch. Steps of
many rows would read each weight often: they widen the matrix once, into memory, and use cuBLAS. The kernel also accepts
floats, for batch-invariant products: see `invariant`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from kernels.gpu.tiles import KIB, Chip, add_dense_product, add_held_product, chip_of, rounded, widened
from kernels.interface import HeldWeight

MOST_ROWS = 256
"""Maximum rows for reading quantised weights directly, as in decode steps. With more, the matrix is widened first."""
BLOCK_N, BLOCK_K = 64, 64
"""Outputs and inputs of a tile. 64 inputs of 4 bits are 32 bytes; with more, an A100 would spill registers."""
LEAST_ROWS, MOST_TILE_ROWS = 16, 64
"""Rows of a tile: the minimum of tensor cores, and the maximum for which the weights still fit into registers."""
PROGRAMS = 512
"""Target number of programs: a few per multiprocessor."""
FOUR_STAGES_BYTES = 84 * KIB
LEAST_BLOCKS = 8
"""Minimum number of BLOCK_K blocks in a split. The overhead of shorter splits exceeds their benefit."""
WIDE_ROWS, WIDE_COLUMNS = 16, 256
"""Outputs and inputs that a program widens to floats."""


class Tile(NamedTuple):
    """Rows, outputs and inputs of a program's tile, the latter as weights of a byte or more; its warps and stages."""

    rows: int
    outputs: int
    inputs: int
    warps: int = 4
    stages: int = 4


@triton.jit(do_not_specialize=["num_rows"])
def multiply_held(
    x, numbers, scale, offset, bias, out, num_rows,
    N: tl.constexpr, K: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr,
    SPLITS: tl.constexpr, WHOLE: tl.constexpr,
    PACKED: tl.constexpr, FLOATS: tl.constexpr, OFFSET: tl.constexpr, BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program (rows, columns, split): a tile of the product over the split's inputs. Those of the same columns follow
    each other, so what one reads of W the next one finds in the cache.

    out [num_rows, N], or float32 [SPLITS, num_rows, N] of several splits, which `add_splits` adds. WHOLE: a program
    takes all splits in turn and adds them in the same order. GROUP 0: `numbers` are floats. With HEADS each has a
    matrix: x [num_rows, HEADS, WIDTH], of which K are read, W [HEADS, N, K], out [num_rows, HEADS, N].
    """
    i_row, i_col, i_split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    COLUMNS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    STORED: tl.constexpr = K // 2 if PACKED else K
    BLOCKS: tl.constexpr = (STORED + BLOCK_K - 1) // BLOCK_K
    PER_SPLIT: tl.constexpr = (BLOCKS + SPLITS - 1) // SPLITS
    SUMS: tl.constexpr = SPLITS if WHOLE else 1
    i_head = i_col // COLUMNS
    o_n = i_col % COLUMNS * BLOCK_N + tl.arange(0, BLOCK_N)
    o_m = i_row * BLOCK_M + tl.arange(0, BLOCK_M)
    m_n, m_m = o_n < N, o_m < num_rows
    p_x = x + o_m.to(tl.int64)[:, None] * (HEADS * WIDTH) + i_head * WIDTH
    p_w = numbers + i_head.to(tl.int64) * N * STORED
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for s in range(SUMS):
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for i in range(PER_SPLIT):
            o_k = ((i_split * SUMS + s) * PER_SPLIT + i) * BLOCK_K + tl.arange(0, BLOCK_K)
            if GROUP:
                acc = add_held_product(
                    acc, p_x, m_m[:, None], p_w, scale, offset, o_n, o_k, N, K, GROUP, PACKED, FLOATS, OFFSET
                )
            else:
                acc = add_dense_product(acc, p_x, m_m[:, None], p_w, o_n, o_k, N, K)
        if SUMS == 1:
            total = acc
        else:
            total += acc
    m_out = m_m[:, None] & m_n[None, :]
    p_out = (i_split * num_rows + o_m).to(tl.int64)[:, None] * (HEADS * N) + i_head * N + o_n[None, :]
    if SPLITS == SUMS and BIAS:
        total += tl.load(bias + o_n, mask=m_n, other=0.0).to(tl.float32)[None, :]
    tl.store(out + p_out, rounded(total, out.dtype.element_ty), mask=m_out)


@triton.jit(do_not_specialize=["num_rows"])
def add_splits(
    parts, bias, out, num_rows,
    N: tl.constexpr, SPLITS: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, columns) adds parts float32 [SPLITS, num_rows, N] in order, then the bias."""
    i_row = tl.program_id(0).to(tl.int64)
    o_n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m = o_n < N
    acc = tl.zeros((BLOCK,), dtype=tl.float32)
    for i in range(SPLITS):
        acc += tl.load(parts + (i * num_rows + i_row) * N + o_n, mask=m, other=0.0)
    if BIAS:
        acc += tl.load(bias + o_n, mask=m, other=0.0).to(tl.float32)
    tl.store(out + i_row * N + o_n, rounded(acc, out.dtype.element_ty), mask=m)


@triton.jit
def widen(
    numbers, scale, offset, out,
    N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
    PACKED: tl.constexpr, FLOATS: tl.constexpr, OFFSET: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program (rows, columns): W [N, K] in the type of `out`, with the bits that `multiply_held` gives it."""
    STORED: tl.constexpr = K // 2 if PACKED else K
    STEP: tl.constexpr = 2 if PACKED else 1
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    m = (o_n < N)[:, None] & (o_k < STORED)[None, :]
    p_s = (o_k * STEP // GROUP)[None, :] * N + o_n[:, None]
    b_scale = tl.load(scale + p_s, mask=m, other=0.0).to(tl.float32)
    if OFFSET:
        b_offset = tl.load(offset + p_s, mask=m, other=0.0).to(tl.float32)
    b_stored = tl.load(numbers + o_n.to(tl.int64)[:, None] * STORED + o_k[None, :], mask=m, other=0)
    for half in tl.static_range(STEP):
        b_w = widened(b_stored, half, FLOATS, PACKED) * b_scale
        if OFFSET:
            b_w += b_offset
        p_out = out + o_n.to(tl.int64)[:, None] * K + (o_k * STEP + half)[None, :]
        tl.store(p_out, rounded(b_w, out.dtype.element_ty), mask=m)


def held_linear(x: Tensor, weight: HeldWeight, bias: Tensor | None, *, wide: bool = False) -> Tensor:
    """As `HeldProducts.held_linear`."""
    rows = x.shape[0]
    if rows > MOST_ROWS:
        made = functional.linear(x, widened_weight(weight, x.dtype), bias)
        return made.float() if wide else made
    tile = Tile(min(MOST_TILE_ROWS, max(LEAST_ROWS, triton.next_power_of_2(rows))), BLOCK_N, BLOCK_K)
    return multiplied(x, weight, bias, tile, torch.float32 if wide else x.dtype)


def multiplied(
    x: Tensor,
    weight: Tensor | HeldWeight,
    bias: Tensor | None,
    tile: Tile,
    dtype: torch.dtype,
    *,
    whole: bool = False,
) -> Tensor:
    """x [rows, heads * n] by W [out, in], or by each head's of W [heads, out, in]: [rows, heads * out] in `dtype`.

    `whole`: no memory for splits, which one program adds up.
    """
    held = weight if isinstance(weight, HeldWeight) else None
    numbers = weight.numbers if isinstance(weight, HeldWeight) else weight
    outputs, inputs = weight.shape[-2:]
    rows, heads = x.shape[0], numbers.shape[0] if numbers.ndim == 3 else 1
    out = torch.empty((rows, heads * outputs), dtype=dtype, device=x.device)
    if not rows:
        return out
    splits = num_splits(heads * outputs, inputs)
    in_parts = splits > 1 and not whole
    parts = torch.empty((splits, *out.shape), dtype=torch.float32, device=x.device) if in_parts else out
    grid = (triton.cdiv(rows, tile.rows), heads * triton.cdiv(outputs, tile.outputs), splits if in_parts else 1)
    multiply_held[grid](
        x.contiguous(), numbers, held and held.scale, held and held.offset, bias, parts, rows,
        N=outputs, K=inputs, HEADS=heads, WIDTH=x.shape[1] // heads, GROUP=held.group if held else 0,
        SPLITS=splits, WHOLE=not in_parts, PACKED=held is not None and held.packed,
        FLOATS=held is not None and held.floats, OFFSET=held is not None and held.offset is not None,
        BIAS=bias is not None, BLOCK_M=tile.rows, BLOCK_N=tile.outputs,
        BLOCK_K=tile.inputs // 2 if held and held.packed else tile.inputs,
        num_warps=tile.warps, num_stages=stages_on(chip_of(x.device), tile), enable_fp_fusion=False,
    )  # fmt: skip
    if in_parts:
        block = 256
        add_splits[(rows, triton.cdiv(heads * outputs, block))](
            parts, bias, out, rows, N=heads * outputs, SPLITS=splits, BIAS=bias is not None, BLOCK=block, num_warps=4,
            enable_fp_fusion=False,
        )  # fmt: skip
    return out


def stages_on(chip: Chip, tile: Tile) -> int:
    """Stages of the pipelined loop. 4 stages of 1-byte weights take 84 KiB, AMD has 64. Results do not depend on it."""
    return min(tile.stages, 3) if chip.shared_bytes < FOUR_STAGES_BYTES else tile.stages


def widened_weight(weight: HeldWeight, dtype: torch.dtype) -> Tensor:
    """W [out, in] in `dtype`."""
    outputs, inputs = weight.shape
    out = torch.empty((outputs, inputs), dtype=dtype, device=weight.numbers.device)
    columns = triton.cdiv(weight.numbers.shape[1], WIDE_COLUMNS)
    widen[(triton.cdiv(outputs, WIDE_ROWS), columns)](
        weight.numbers, weight.scale, weight.offset, out,
        N=outputs, K=inputs, GROUP=weight.group,
        PACKED=weight.packed, FLOATS=weight.floats, OFFSET=weight.offset is not None,
        BLOCK_N=WIDE_ROWS, BLOCK_K=WIDE_COLUMNS, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def num_splits(outputs: int, inputs: int) -> int:
    """Return the number of splits of the inputs, a power of two."""
    columns, blocks = triton.cdiv(outputs, BLOCK_N), triton.cdiv(inputs, BLOCK_K)
    splits = 1
    while splits * columns < PROGRAMS and blocks // (2 * splits) >= LEAST_BLOCKS:
        splits *= 2
    return splits
