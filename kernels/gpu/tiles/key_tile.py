"""One step of attention's online softmax: a tile of keys and values out of the blocks, folded into the running sums.

Scores are kept in base 2. They are scaled in float32 after the product: the multiplication is part of the fused one
that subtracts the maximum, so it is free, and the queries are not rounded a second time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gpu.tiles.rounding import INTERPRETED, rounded


@triton.jit
def attend_tile(
    b_q, b_m, b_l, b_acc, p_kv, p_table, start, begin, end, low, high, scale, softcap,
    BLOCK_STRIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, SOFTCAP: tl.constexpr, FP8_BITS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Keys start .. start + BLOCK_N - 1 into maximum b_m [M], sum b_l [M] and b_acc [M, BLOCK_D] of queries b_q.

    p_kv points at a layer's head of block 0. MASKED: slots outside of [begin, end) are not read, and a row sees the
    keys of [low, high), scalars or [M, 1]. A tile without visible keys leaves a row's sums unchanged, bit for bit.
    """
    o_n, o_d = start + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    m_n = (o_n >= begin) & (o_n < end)
    if BLOCK_SIZE % BLOCK_N == 0:
        b_block = tl.load(p_table + start // BLOCK_SIZE).to(tl.int64)
        p_token = p_kv + b_block * BLOCK_STRIDE
        p_k = p_token + (start % BLOCK_SIZE + tl.arange(0, BLOCK_N))[:, None] * (2 * HEAD_DIM) + o_d[None, :]
    else:
        if MASKED:
            b_block = tl.load(p_table + o_n // BLOCK_SIZE, mask=m_n, other=0).to(tl.int64)
        else:
            b_block = tl.load(p_table + o_n // BLOCK_SIZE).to(tl.int64)
        p_k = p_kv + (b_block * BLOCK_STRIDE + o_n % BLOCK_SIZE * (2 * HEAD_DIM))[:, None] + o_d[None, :]
    m_kv = (o_d < HEAD_DIM)[None, :]
    if MASKED:
        m_kv &= m_n[:, None]
    WHOLE: tl.constexpr = not MASKED and HEAD_DIM == BLOCK_D
    b_k = dequantised(tl.load(p_k) if WHOLE else tl.load(p_k, mask=m_kv, other=0.0), b_q.dtype, FP8_BITS)
    b_m, b_l, b_p, b_shrink = weighed(b_q, b_m, b_l, b_k, o_n, low, high, scale, softcap, SOFTCAP, MASKED)
    p_v = p_k + HEAD_DIM
    b_v = dequantised(tl.load(p_v) if WHOLE else tl.load(p_v, mask=m_kv, other=0.0), b_q.dtype, FP8_BITS)
    return b_m, b_l, product(rounded(b_p, b_q.dtype), b_v, b_acc * b_shrink[:, None])


@triton.jit
def weighed(
    b_q, b_m, b_l, b_k, o_n, low, high, scale, softcap,
    SOFTCAP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Maximum and sum with keys b_k [N, BLOCK_D] at o_n [N], their weights [M, N], and the factor [M] of what was
    summed up before them."""
    b_s = product(b_q, tl.trans(b_k), tl.zeros([b_q.shape[0], b_k.shape[0]], tl.float32))
    if SOFTCAP:
        # softcap * tanh(s / softcap) by exp2; `scale` takes 2 s / softcap to base 2, `softcap` is in base 2 already
        b_s = softcap - 2.0 * softcap / (tl.exp2(b_s * scale) + 1.0)
        scale = 1.0
    if MASKED:
        b_s = tl.where((o_n[None, :] >= low) & (o_n[None, :] < high), b_s, float("-inf"))
    b_new = tl.maximum(b_m, tl.max(b_s, 1) * scale)
    # a row that has seen nothing yet must not compute -inf - -inf
    b_from = tl.where(b_new == float("-inf"), 0.0, b_new) if MASKED else b_new
    b_p = tl.exp2(tl.fma(b_s, tl.zeros_like(b_s) + scale, -b_from[:, None]))
    b_shrink = tl.exp2(b_m - b_from)
    return b_new, b_l * b_shrink + tl.sum(b_p, 1), b_p, b_shrink


@triton.jit
def product(a, b, acc):
    """acc + a b, float32 accurate to its last bits if a and b are float32."""
    if INTERPRETED:  # the interpreter has no product of bfloat16
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def dequantised(x, dtype: tl.constexpr, FP8_BITS: tl.constexpr):
    """x as `dtype`. With FP8_BITS x is uint8, the bits of e4m3 numbers, for chips that cannot convert those.

    Shifted into place they are a wider number's bits, but for the bias of the exponent: a power of two, exact for
    subnormal numbers too.
    """
    if FP8_BITS:
        if dtype == tl.float16:
            half = x.to(tl.uint16)
            x = (((half & 0x80) << 8) | ((half & 0x7F) << 7)).to(tl.float16, bitcast=True) * 2.0**8
        else:
            word = x.to(tl.uint32)
            x = (((word & 0x80) << 24) | ((word & 0x7F) << 20)).to(tl.float32, bitcast=True) * 2.0**120
    return x.to(dtype)


@triton.jit
def with_sink(b_m, b_l, b_acc, b_sink):
    """An extra logit b_sink [M], natural base, in the softmax's denominator: it takes part and has no value."""
    b_sink *= 1.4426950408889634
    b_top = tl.maximum(b_m, b_sink)
    b_shrink = tl.exp2(b_m - b_top)
    return b_l * b_shrink + tl.exp2(b_sink - b_top), b_acc * b_shrink[:, None]
