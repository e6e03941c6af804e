"""RMSNorm (Zhang and Sennrich, arXiv 1910.07467), alone or of a sum that is kept as the new residual."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.tiles.rounding import rounded

TILE = 4096  # numbers that a program holds: narrow rows share one


@triton.jit(do_not_specialize=["num_rows"])
def norm_rows(
    x, delta, total, weight, out, num_rows, width, stride_x, stride_delta, eps,
    BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """A program normalises BLOCK_ROWS rows of BLOCK >= width numbers; with ADD it stores x + delta in `total` first."""
    o_row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    o_col = tl.arange(0, BLOCK)
    m = (o_row < num_rows)[:, None] & (o_col < width)[None, :]
    b_x = tl.load(x + o_row[:, None] * stride_x + o_col[None, :], mask=m, other=0.0).to(tl.float32)
    if ADD:
        b_delta = tl.load(delta + o_row[:, None] * stride_delta + o_col[None, :], mask=m, other=0.0)
        b_total = rounded(b_x + b_delta.to(tl.float32), total.dtype.element_ty)
        tl.store(total + o_row[:, None] * width + o_col[None, :], b_total, mask=m)
        b_x = b_total.to(tl.float32)  # what the next addition will find
    b_scale = 1.0 / tl.sqrt_rn(tl.sum(b_x * b_x, 1) / width + eps)  # [BLOCK_ROWS]
    b_weight = tl.load(weight + o_col, mask=o_col < width, other=0.0)
    b_out = rounded(b_x * b_scale[:, None] * b_weight[None, :], out.dtype.element_ty)
    tl.store(out + o_row[:, None] * width + o_col[None, :], b_out, mask=m)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `Kernels.rms_norm`. A row's result depends on nothing but the row."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(_rows(x), None, None, weight, out, eps)
    return out


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As `Kernels.add_rms_norm`: the sum is rounded to x's dtype, and what is normalised is the rounded sum."""
    total, out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    _launch(_rows(x), _rows(delta), total, weight, out, eps)
    return total, out


def _rows(x: Tensor) -> Tensor:
    """[rows, width] with contiguous rows: a view where x allows it."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


def norm_tile(width: int) -> tuple[int, int, int]:
    """Rows and columns of a tile, and warps. By the width alone, so that a row is summed alike in every batch."""
    block = triton.next_power_of_2(width)
    rows = max(1, min(16, TILE // block))
    return rows, block, max(4, min(16, rows * block // 512))


def _launch(x: Tensor, delta: Tensor | None, total: Tensor | None, weight: Tensor, out: Tensor, eps: float) -> None:
    num_rows, width = x.shape
    if not num_rows:
        return
    rows, block, warps = norm_tile(width)
    norm_rows[(triton.cdiv(num_rows, rows),)](
        x, delta, total, weight, out, num_rows, width, x.stride(0), 0 if delta is None else delta.stride(0), eps,
        BLOCK_ROWS=rows, BLOCK=block, ADD=delta is not None, num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip
