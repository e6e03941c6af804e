"""From a projection to attention's inputs in one pass: q/k norm, rotary embedding, keys and values into the cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.tiles.rounding import e4m3_bits, rounded
from kernels.interface import UNSCALED, HeadNorms, KVScales

TILE = 1024  # numbers of a token that a program rotates: heads are grouped to fill it
PLAIN, EACH, WIDE = 0, 1, 2  # no norm, one of each head, one of all heads together


@triton.jit
def inverse_norm(p_x, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """1 / sqrt(mean of the squares of the WIDTH numbers at p_x + eps), float32."""
    o = tl.arange(0, BLOCK)
    b_squares = tl.zeros([BLOCK], tl.float32)
    for i in range(0, WIDTH, BLOCK):
        b_x = tl.load(p_x + i + o, mask=i + o < WIDTH, other=0.0).to(tl.float32)
        b_squares += b_x * b_x
    return 1.0 / tl.sqrt_rn(tl.sum(b_squares, 0) / WIDTH + eps)


@triton.jit
def rotated(
    p_x, o_head, m_head, b_cos, b_sin, norm, eps,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_HALF: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Both halves of heads o_head [H] of the NUM_HEADS at p_x, rotated, float32 [H, BLOCK_HALF] each."""
    HALF: tl.constexpr = HEAD_DIM // 2
    o_d = tl.arange(0, BLOCK_HALF)
    m = m_head[:, None] & (o_d < HALF)[None, :]
    p_first = p_x + o_head[:, None] * HEAD_DIM + o_d[None, :]
    b_first = tl.load(p_first, mask=m, other=0.0).to(tl.float32)
    b_second = tl.load(p_first + HALF, mask=m, other=0.0).to(tl.float32)
    if NORM == 1:
        b_square = tl.sum(b_first * b_first, 1) + tl.sum(b_second * b_second, 1)
        b_scale = (1.0 / tl.sqrt_rn(b_square / HEAD_DIM + eps))[:, None]
        b_weight = tl.load(norm + o_d, mask=o_d < HALF, other=0.0)[None, :]
        b_first = rounded(b_first * b_scale * b_weight, p_x.dtype.element_ty).to(tl.float32)
        b_weight = tl.load(norm + HALF + o_d, mask=o_d < HALF, other=0.0)[None, :]
        b_second = rounded(b_second * b_scale * b_weight, p_x.dtype.element_ty).to(tl.float32)
    if NORM == 2:
        b_whole = inverse_norm(p_x, eps, NUM_HEADS * HEAD_DIM, 1024)
        p_norm = norm + o_head[:, None] * HEAD_DIM + o_d[None, :]
        b_weight = tl.load(p_norm, mask=m, other=0.0)
        b_first = rounded(b_first * b_whole * b_weight, p_x.dtype.element_ty).to(tl.float32)
        b_weight = tl.load(p_norm + HALF, mask=m, other=0.0)
        b_second = rounded(b_second * b_whole * b_weight, p_x.dtype.element_ty).to(tl.float32)
    return b_first * b_cos - b_second * b_sin, b_second * b_cos + b_first * b_sin


@triton.jit
def cache_number(x, divisor, p_kv, FP8: tl.constexpr):
    """float32 x as the cache holds it."""
    if FP8:
        return e4m3_bits(tl.div_rn(x, tl.zeros_like(x) + divisor))
    return rounded(x, p_kv.dtype.element_ty)


@triton.jit(do_not_specialize=["layer"], do_not_specialize_on_alignment=["slots"])
def rotate_tokens(
    qkv, cos, sin, q, kv, slots, q_norm, k_norm, layer, num_layers, stride_qkv, eps, k_scale, v_scale,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_HALF: tl.constexpr, BLOCK_HEADS: tl.constexpr, NORM: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Program (token, group) processes BLOCK_HEADS query heads; the groups after those process KV heads."""
    HALF: tl.constexpr = HEAD_DIM // 2
    QUERY_GROUPS: tl.constexpr = (NUM_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    i_token, i_group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b_slot = tl.load(slots + i_token)
    if b_slot >= 0:
        o_d = tl.arange(0, BLOCK_HALF)
        m_d = o_d < HALF
        b_cos = tl.load(cos + i_token * HALF + o_d, mask=m_d, other=0.0)[None, :]
        b_sin = tl.load(sin + i_token * HALF + o_d, mask=m_d, other=0.0)[None, :]
        p_x = qkv + i_token * stride_qkv
        if i_group < QUERY_GROUPS:
            o_head = i_group * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
            m_head = o_head < NUM_HEADS
            b_first, b_second = rotated(
                p_x, o_head, m_head, b_cos, b_sin, q_norm, eps, NUM_HEADS, HEAD_DIM, BLOCK_HALF, NORM
            )
            m = m_head[:, None] & m_d[None, :]
            p_out = q + (i_token * NUM_HEADS + o_head)[:, None] * HEAD_DIM + o_d[None, :]
            tl.store(p_out, rounded(b_first, q.dtype.element_ty), mask=m)
            tl.store(p_out + HALF, rounded(b_second, q.dtype.element_ty), mask=m)
        else:
            o_head = (i_group - QUERY_GROUPS) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
            m_head = o_head < NUM_KV_HEADS
            p_x += NUM_HEADS * HEAD_DIM
            b_first, b_second = rotated(
                p_x, o_head, m_head, b_cos, b_sin, k_norm, eps, NUM_KV_HEADS, HEAD_DIM, BLOCK_HALF, NORM
            )
            m = m_head[:, None] & m_d[None, :]
            i_block = b_slot // BLOCK_SIZE * num_layers + layer  # int64, as slots are
            o_row = ((i_block * NUM_KV_HEADS + o_head) * BLOCK_SIZE + b_slot % BLOCK_SIZE)[:, None]
            p_k = kv + o_row * (2 * HEAD_DIM) + o_d[None, :]
            tl.store(p_k, cache_number(b_first, k_scale, kv, FP8), mask=m)
            tl.store(p_k + HALF, cache_number(b_second, k_scale, kv, FP8), mask=m)
            p_v = p_x + (NUM_KV_HEADS + o_head)[:, None] * HEAD_DIM + o_d[None, :]
            b_first = tl.load(p_v, mask=m, other=0.0).to(tl.float32)
            b_second = tl.load(p_v + HALF, mask=m, other=0.0).to(tl.float32)
            tl.store(p_k + HEAD_DIM, cache_number(b_first, v_scale, kv, FP8), mask=m)
            tl.store(p_k + HEAD_DIM + HALF, cache_number(b_second, v_scale, kv, FP8), mask=m)


def rotate_and_write(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv: Tensor,
    layer: int,
    slots: Tensor,
    norms: HeadNorms | None,
    scales: KVScales = UNSCALED,
) -> Tensor:
    """As `Kernels.rotate_and_write`. A token with a negative slot is padding: nothing of it is written, q included."""
    _, num_layers, kv_heads, block_size, _, dim = kv.shape
    tokens, heads = qkv.shape[0], qkv.shape[1] // dim - 2 * kv_heads
    fp8 = kv.dtype == torch.float8_e4m3fn
    q = torch.empty((tokens, heads, dim), dtype=qkv.dtype, device=qkv.device)
    if not tokens:
        return q
    qkv = qkv if qkv.stride(1) == 1 else qkv.contiguous()
    q_norm, k_norm, eps = norms or (None, None, 0.0)
    kind = PLAIN if q_norm is None else WIDE if len(q_norm) > dim else EACH
    half, block_heads, warps = rotary_tile(heads, dim)
    grid = (tokens, triton.cdiv(heads, block_heads) + triton.cdiv(kv_heads, block_heads))
    rotate_tokens[grid](
        qkv, cos.contiguous(), sin.contiguous(), q, kv.view(torch.uint8) if fp8 else kv, slots, q_norm, k_norm,
        layer, num_layers, qkv.stride(0), eps, *scales,
        NUM_HEADS=heads, NUM_KV_HEADS=kv_heads, HEAD_DIM=dim, BLOCK_SIZE=block_size, BLOCK_HALF=half,
        BLOCK_HEADS=block_heads, NORM=kind, FP8=fp8, num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip
    return q


def rotary_tile(num_heads: int, head_dim: int) -> tuple[int, int, int]:
    """Numbers of half a head, padded; heads of a program; warps, so that a thread moves 8 numbers at once."""
    half = triton.next_power_of_2(head_dim // 2)
    heads = max(1, min(triton.next_power_of_2(num_heads), TILE // (2 * half)))
    return half, heads, max(1, min(4, heads * half // 256))
