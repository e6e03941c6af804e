"""Products with tiles of weights: of floats, and of stored numbers as the floats that they stand for."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gpu.tiles.key_tile import dequantised, product
from kernels.gpu.tiles.rounding import rounded


@triton.jit
def widened(b, HALF: tl.constexpr, FLOATS: tl.constexpr, PACKED: tl.constexpr):
    """Stored numbers as float32: of two in a byte the lower or the upper HALF."""
    if PACKED:
        b = (b >> 4) if HALF else (b & 15)
        if FLOATS:  # e2m1 in place is a wider number but for the bias of the exponent, as with e4m3
            word = b.to(tl.uint32)
            return (((word & 8) << 28) | ((word & 7) << 22)).to(tl.float32, bitcast=True) * 2.0**126
    return dequantised(b, tl.float32, FLOATS)


@triton.jit
def add_dense_product(acc, p_x, m_x, weights, o_n, o_k, N: tl.constexpr, K: tl.constexpr):
    """As `add_held_product`, for W [N, K] of floats."""
    m_k, m_n = o_k < K, o_n < N
    b_x = tl.load(p_x + o_k[None, :], mask=m_x & m_k[None, :], other=0.0)
    b_w = tl.load(weights + o_n.to(tl.int64)[None, :] * K + o_k[:, None], mask=m_k[:, None] & m_n[None, :], other=0.0)
    return product(b_x, b_w, acc)


@triton.jit
def add_held_product(
    acc, p_x, m_x, numbers, scale, offset, o_n, o_k,
    N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
    PACKED: tl.constexpr, FLOATS: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """acc [M, N'] + x W^T of outputs o_n [N'] and the inputs that are stored at o_k [K'], for W [N, K].

    p_x [M, 1]: where the rows of x begin, of which m_x [M, 1] are read.
    """
    STORED: tl.constexpr = K // 2 if PACKED else K
    STEP: tl.constexpr = 2 if PACKED else 1
    m_k, m_n = o_k < STORED, o_n < N
    m_w = m_k[:, None] & m_n[None, :]
    p_s = (o_k * STEP // GROUP)[:, None] * N + o_n[None, :]
    b_scale = tl.load(scale + p_s, mask=m_w, other=0.0).to(tl.float32)
    if OFFSET:
        b_offset = tl.load(offset + p_s, mask=m_w, other=0.0).to(tl.float32)
    b_stored = tl.load(numbers + o_n.to(tl.int64)[None, :] * STORED + o_k[:, None], mask=m_w, other=0)
    for half in tl.static_range(STEP):
        b_w = widened(b_stored, half, FLOATS, PACKED) * b_scale
        if OFFSET:
            b_w += b_offset
        b_x = tl.load(p_x + (o_k * STEP + half)[None, :], mask=m_x & m_k[None, :], other=0.0)
        acc = product(b_x, rounded(b_w, p_x.dtype.element_ty), acc)
    return acc
