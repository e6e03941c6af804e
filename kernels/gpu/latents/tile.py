"""One step of attention over latents: a tile of keys, whose first numbers are their values too, into the running sums.

As `key_tile`, with the parts of a key that do and do not have a rotation side by side: neither is padded to the size
of both, and the first is read once for scores and values.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gpu.key_tile import dequantised, product
from kernels.gpu.rounding import rounded


@triton.jit
def attend_latents(
    b_qc, b_qr, b_m, b_l, b_acc, p_kv, p_table, start, end, high, scale,
    BLOCK_STRIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, FP8_BITS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Keys start .. start + BLOCK_N - 1 into b_m [M], b_l [M] and b_acc [M, BLOCK_C] of queries b_qc [M, BLOCK_C] and
    b_qr [M, BLOCK_R].

    p_kv points at a layer of block 0. MASKED: slots from `end` on are not read, and a row sees the keys below `high`, a
    scalar or [M, 1]. A tile of which a row sees nothing leaves its sums as they are, bit for bit.
    """
    o_n, o_c, o_r = start + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_R)
    m_n = o_n < end
    if BLOCK_SIZE % BLOCK_N == 0:
        b_block = tl.load(p_table + start // BLOCK_SIZE).to(tl.int64)
        p_key = p_kv + b_block * BLOCK_STRIDE + (start % BLOCK_SIZE + tl.arange(0, BLOCK_N))[:, None] * (RANK + ROPE)
    else:
        if MASKED:
            b_block = tl.load(p_table + o_n // BLOCK_SIZE, mask=m_n, other=0).to(tl.int64)
        else:
            b_block = tl.load(p_table + o_n // BLOCK_SIZE).to(tl.int64)
        p_key = p_kv + (b_block * BLOCK_STRIDE + o_n % BLOCK_SIZE * (RANK + ROPE))[:, None]
    m_c, m_r = (o_c < RANK)[None, :], (o_r < ROPE)[None, :]
    if MASKED:
        m_c, m_r = m_c & m_n[:, None], m_r & m_n[:, None]
    p_c, p_r = p_key + o_c[None, :], p_key + RANK + o_r[None, :]
    b_c = tl.load(p_c) if not MASKED and RANK == BLOCK_C else tl.load(p_c, mask=m_c, other=0.0)
    b_r = tl.load(p_r) if not MASKED and ROPE == BLOCK_R else tl.load(p_r, mask=m_r, other=0.0)
    b_c, b_r = dequantised(b_c, b_qc.dtype, FP8_BITS), dequantised(b_r, b_qr.dtype, FP8_BITS)
    b_s = product(b_qc, tl.trans(b_c), tl.zeros([b_qc.shape[0], BLOCK_N], tl.float32))
    b_s = product(b_qr, tl.trans(b_r), b_s)
    if MASKED:
        b_s = tl.where(o_n[None, :] < high, b_s, float("-inf"))
    b_new = tl.maximum(b_m, tl.max(b_s, 1) * scale)
    # a row that has seen nothing yet must not compute -inf - -inf
    b_from = tl.where(b_new == float("-inf"), 0.0, b_new) if MASKED else b_new
    b_p = tl.exp2(tl.fma(b_s, tl.zeros_like(b_s) + scale, -b_from[:, None]))
    b_shrink = tl.exp2(b_m - b_from)
    b_l = b_l * b_shrink + tl.sum(b_p, 1)
    b_acc = product(rounded(b_p, b_qc.dtype), b_c, b_acc * b_shrink[:, None])
    return b_new, b_l, b_acc
