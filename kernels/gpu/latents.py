"""From projections to the inputs of attention over latents: their norm, rotation, the cache, and whole queries."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.rotary import cache_number
from kernels.gpu.tiles.rounding import rounded
from kernels.interface import LatentNorm

TILE = 4096  # numbers of a token that a program copies: heads are grouped to fill it


@triton.jit(do_not_specialize=["layer"], do_not_specialize_on_alignment=["slots"])
def write_tokens(
    q, absorbed, latents, cos, sin, norm, queries, kv, slots, layer, num_layers, eps, k_scale,
    NUM_HEADS: tl.constexpr, QUERY_DIM: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    FP8: tl.constexpr,
):  # fmt: skip
    """Program (token, group) writes the queries of BLOCK_HEADS heads; the last group writes the token's latent."""
    HALF: tl.constexpr = ROPE // 2
    GROUPS: tl.constexpr = (NUM_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    i_token, i_group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b_slot = tl.load(slots + i_token)
    if b_slot >= 0:
        o_c, o_d = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_HALF)
        m_d = o_d < HALF
        b_cos = tl.load(cos + i_token * HALF + o_d, mask=m_d, other=0.0)
        b_sin = tl.load(sin + i_token * HALF + o_d, mask=m_d, other=0.0)
        if i_group < GROUPS:
            o_head = i_group * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
            o_row = (i_token * NUM_HEADS + o_head)[:, None]
            m_head = (o_head < NUM_HEADS)[:, None]
            m_c, m = m_head & (o_c < RANK)[None, :], m_head & m_d[None, :]
            p_out = queries + o_row * (RANK + ROPE)
            tl.store(p_out + o_c[None, :], tl.load(absorbed + o_row * RANK + o_c[None, :], mask=m_c), mask=m_c)
            p_x = q + o_row * QUERY_DIM + (QUERY_DIM - ROPE) + o_d[None, :]
            b_first = tl.load(p_x, mask=m, other=0.0).to(tl.float32)
            b_second = tl.load(p_x + HALF, mask=m, other=0.0).to(tl.float32)
            b_turned = b_first * b_cos[None, :] - b_second * b_sin[None, :]
            tl.store(p_out + RANK + o_d[None, :], rounded(b_turned, queries.dtype.element_ty), mask=m)
            b_turned = b_second * b_cos[None, :] + b_first * b_sin[None, :]
            tl.store(p_out + RANK + HALF + o_d[None, :], rounded(b_turned, queries.dtype.element_ty), mask=m)
        else:  # separate variable names, because the types differ
            m_rank = o_c < RANK
            p_latent = latents + i_token * (RANK + ROPE)
            b_x = tl.load(p_latent + o_c, mask=m_rank, other=0.0).to(tl.float32)
            b_x *= 1.0 / tl.sqrt_rn(tl.sum(b_x * b_x, 0) / RANK + eps)
            b_x *= tl.load(norm + o_c, mask=m_rank, other=0.0)
            i_block = b_slot // BLOCK_SIZE * num_layers + layer  # int64, as slots are
            p_kv = kv + (i_block * BLOCK_SIZE + b_slot % BLOCK_SIZE) * (RANK + ROPE)
            tl.store(p_kv + o_c, cache_number(b_x, k_scale, kv, FP8), mask=m_rank)
            b_low = tl.load(p_latent + RANK + o_d, mask=m_d, other=0.0).to(tl.float32)
            b_high = tl.load(p_latent + RANK + HALF + o_d, mask=m_d, other=0.0).to(tl.float32)
            b_key = cache_number(b_low * b_cos - b_high * b_sin, k_scale, kv, FP8)
            tl.store(p_kv + RANK + o_d, b_key, mask=m_d)
            b_key = cache_number(b_high * b_cos + b_low * b_sin, k_scale, kv, FP8)
            tl.store(p_kv + RANK + HALF + o_d, b_key, mask=m_d)


def write_latents(
    q: Tensor,
    absorbed: Tensor,
    latents: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv: Tensor,
    layer: int,
    slots: Tensor,
    norm: LatentNorm,
    scale: float = 1.0,
) -> Tensor:
    """As `Kernels.write_latents`. A token whose slot is negative is padding: nothing of it is written, q included."""
    _, num_layers, _, block_size, _, dim = kv.shape
    tokens, rope = len(latents), 2 * cos.shape[1]
    rank = dim - rope
    heads = absorbed.shape[1] // rank
    queries = torch.empty((tokens, heads, dim), dtype=q.dtype, device=q.device)
    if not tokens:
        return queries
    fp8 = kv.dtype == torch.float8_e4m3fn
    width, block_heads, warps = latent_tile(heads, rank)
    write_tokens[(tokens, triton.cdiv(heads, block_heads) + 1)](
        q.contiguous(), absorbed.contiguous(), latents.contiguous(), cos.contiguous(), sin.contiguous(), norm.weight,
        queries, kv.view(torch.uint8) if fp8 else kv, slots, layer, num_layers, norm.eps, scale,
        NUM_HEADS=heads, QUERY_DIM=q.shape[1] // heads, RANK=rank, ROPE=rope, BLOCK_SIZE=block_size, BLOCK_C=width,
        BLOCK_HALF=triton.next_power_of_2(rope // 2), BLOCK_HEADS=block_heads, FP8=fp8, num_warps=warps,
        enable_fp_fusion=False,
    )  # fmt: skip
    return queries


def latent_tile(num_heads: int, rank: int) -> tuple[int, int, int]:
    """Numbers of a latent, padded; heads of a program; warps."""
    width = triton.next_power_of_2(rank)
    heads = max(1, min(triton.next_power_of_2(num_heads), TILE // width))
    return width, heads, max(1, min(4, heads * width // 256))
