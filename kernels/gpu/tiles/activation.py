"""The gate of a gated MLP: activation(gate) * up, of one read of both."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.tiles.rounding import rounded

BLOCK = 1024
"""Numbers that a program holds."""
GATES = ("silu", "gelu_tanh", "clamped_swiglu")
"""By the number that the kernel knows them by."""


@triton.jit
def gate_rows(gate_up, out, width, stride_row, GATE: tl.constexpr, BLOCK: tl.constexpr):
    """A program computes BLOCK numbers of one row."""
    i_row = tl.program_id(0).to(tl.int64)
    o_col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m = o_col < width
    p_gate = gate_up + i_row * stride_row + o_col
    b_gate = tl.load(p_gate, mask=m, other=0.0).to(tl.float32)
    b_up = tl.load(p_gate + width, mask=m, other=0.0).to(tl.float32)
    b_slope = b_gate
    if GATE == 2:  # bounded, not by a minimum, which would drop NaN
        b_gate = tl.where(b_gate > 7.0, 7.0, b_gate)
        b_up = tl.where(b_up > 7.0, 7.0, b_up)
        b_up = tl.where(b_up < -7.0, -7.0, b_up) + 1.0
        b_slope = 1.702 * b_gate
    if GATE == 1:  # (1 + tanh(z)) / 2 is the logistic function of 2 z
        b_slope = 1.5957691216057308 * (b_gate + 0.044715 * b_gate * b_gate * b_gate)
    b_out = b_gate / (1.0 + tl.exp(-tl.maximum(b_slope, -80.0))) * b_up  # exp stays finite, the quotient next to zero
    tl.store(out + i_row * width + o_col, rounded(b_out, out.dtype.element_ty), mask=m)


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """As `Kernels.gated`; rounded once, at the end. ValueError for an unknown activation."""
    if activation not in GATES:
        raise ValueError(f"activation {activation!r} is not one of {', '.join(GATES)}")
    if gate_up.stride(1) != 1:
        gate_up = gate_up.contiguous()
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        gate_rows[(rows, triton.cdiv(width, BLOCK))](
            gate_up, out, width, gate_up.stride(0),
            GATE=GATES.index(activation), BLOCK=BLOCK, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out
