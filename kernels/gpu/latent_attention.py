"""Attention over latents: splits for sequences with one query row, tiles for several rows.

Uses the work lists, summation order and reduction of `decode_attention` and `prefill_attention`. All query heads share
the same keys, so a query tile consists of the heads of one token, or of several tokens if there are few heads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.decode_attention import MIN_ROWS, combine, store_partials, within_split
from kernels.gpu.device_plan import GPUPlan
from kernels.gpu.prefill_attention import run_query_work
from kernels.gpu.query_work import Tiling
from kernels.gpu.scores import Scores
from kernels.gpu.tiles.chip import Chip, chip_of
from kernels.gpu.tiles.key_tile import dequantised, product
from kernels.gpu.tiles.rounding import rounded


class LatentTile(NamedTuple):
    """rows: heads, or tokens x heads, of a program; tile: keys a step; stages: of the loop over tiles."""

    rows: int
    tile: int
    warps: int
    stages: int


def decode_config(dtype: torch.dtype, chip: Chip) -> LatentTile:
    """Choose the tile for queries of `dtype` on a chip.

    By the compiler's report: sums of 512 numbers per row stay in registers, and nothing spills. With 32 rows on compute
    capability 8.0, registers spill.
    """
    if dtype == torch.float32:  # exact products, on the ordinary cores: for tests
        return LatentTile(MIN_ROWS, tile=16, warps=8, stages=2)
    if chip.vendor == "amd":
        return LatentTile(MIN_ROWS, tile=16, warps=4, stages=2)
    if chip.has_little_memory:  # consumer Blackwell spills with tiles of 32, others in e4m3
        return LatentTile(MIN_ROWS, tile=16, warps=8, stages=3)
    return LatentTile(MIN_ROWS, tile=32, warps=8, stages=3 if chip.multiplies_by_warpgroup else 2)


def prefill_config(dtype: torch.dtype, chip: Chip) -> LatentTile:
    """Choose the tile for prefill: like `decode_config`, with more rows, limited by the registers for sums."""
    if dtype == torch.float32:
        return LatentTile(MIN_ROWS, tile=16, warps=8, stages=2)
    if chip.vendor == "amd":
        return LatentTile(32, tile=16, warps=4, stages=2)
    return LatentTile(32, tile=16 if chip.has_little_memory else 32, warps=8, stages=2)


@triton.jit
def attend_latents(
    b_qc, b_qr, b_m, b_l, b_acc, p_kv, p_table, start, end, high, scale,
    BLOCK_STRIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, FP8_BITS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Keys start .. start + BLOCK_N - 1 into b_m [M], b_l [M] and b_acc [M, BLOCK_C] of queries b_qc [M, BLOCK_C] and
    b_qr [M, BLOCK_R].

    p_kv points at a layer of block 0. MASKED: slots from `end` on are not read, and a row sees the keys below `high`, a
    scalar or [M, 1]. A tile without visible keys leaves a row's sums unchanged, bit for bit.
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


@triton.jit(do_not_specialize=["layer", "table_width"])
def attend_latent_splits(
    q, kv, block_tables, spans, items, total, partial, lse, out,
    layer, table_width, scale, v_scale, stride_q_row, stride_q_head,
    NUM_LAYERS: tl.constexpr, NUM_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, RANK: tl.constexpr,
    ROPE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, FP8_BITS: tl.constexpr,
):  # fmt: skip
    """Program (item of the work list, BLOCK_G heads): a loop over items would take registers that the sums need.

    Partial results are float32 [places, heads, RANK], each already divided by its sum, and lse [places, heads] is the
    base 2 logarithm of that sum."""
    LAYER_STRIDE: tl.constexpr = BLOCK_SIZE * (RANK + ROPE)
    BLOCK_STRIDE: tl.constexpr = NUM_LAYERS * LAYER_STRIDE
    GROUPS: tl.constexpr = (NUM_HEADS + BLOCK_G - 1) // BLOCK_G
    o_c, o_r = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_R)
    p_kv = kv + layer.to(tl.int64) * LAYER_STRIDE
    i_work = tl.program_id(0)
    if i_work < tl.load(total) * GROUPS:
        p_item = items + i_work // GROUPS * 4
        i_span, begin, end, i_place = tl.load(p_item), tl.load(p_item + 1), tl.load(p_item + 2), tl.load(p_item + 3)
        i_row = tl.load(spans + i_span * 3).to(tl.int64)
        o_head = i_work % GROUPS * BLOCK_G + tl.arange(0, BLOCK_G)
        m_g = o_head < NUM_HEADS
        m_c = m_g[:, None] & (o_c < RANK)[None, :]  # [BLOCK_G, BLOCK_C]
        p_q = q + i_row * stride_q_row + o_head[:, None] * stride_q_head
        b_qc = tl.load(p_q + o_c[None, :], mask=m_c, other=0.0)
        b_qr = tl.load(p_q + RANK + o_r[None, :], mask=m_g[:, None] & (o_r < ROPE)[None, :], other=0.0)
        p_table = block_tables + i_span.to(tl.int64) * table_width

        b_m = tl.full([BLOCK_G], float("-inf"), tl.float32)
        b_l = tl.zeros([BLOCK_G], tl.float32)
        b_acc = tl.zeros([BLOCK_G, BLOCK_C], tl.float32)
        last = end // BLOCK_N * BLOCK_N
        for start in tl.range(begin, last, BLOCK_N, num_stages=STAGES):  # splits begin at multiples of a tile
            b_m, b_l, b_acc = attend_latents(
                b_qc, b_qr, b_m, b_l, b_acc, p_kv, p_table, start, end, end, scale,
                BLOCK_STRIDE, BLOCK_SIZE, RANK, ROPE, BLOCK_C, BLOCK_R, BLOCK_N, FP8_BITS, False,
            )  # fmt: skip
        if last < end:
            b_m, b_l, b_acc = attend_latents(
                b_qc, b_qr, b_m, b_l, b_acc, p_kv, p_table, last, end, end, scale,
                BLOCK_STRIDE, BLOCK_SIZE, RANK, ROPE, BLOCK_C, BLOCK_R, BLOCK_N, FP8_BITS, True,
            )  # fmt: skip

        b_out = b_acc / b_l[:, None]
        if i_place >= 0:
            o_place = i_place.to(tl.int64) * NUM_HEADS + o_head
            tl.store(partial + o_place[:, None] * RANK + o_c[None, :], b_out, mask=m_c)
            tl.store(lse + o_place, b_m + tl.log2(b_l), mask=m_g)
        else:
            p_out = out + (i_row * NUM_HEADS + o_head)[:, None] * RANK + o_c[None, :]
            tl.store(p_out, rounded(b_out * v_scale, out.dtype.element_ty), mask=m_c)


@triton.jit(do_not_specialize=["layer", "table_width"])
def attend_latent_tiles(
    q, kv, block_tables, spans, tiles, partial, lse, out,
    layer, table_width, scale, v_scale, stride_q_row, stride_q_head,
    NUM_LAYERS: tl.constexpr, NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr, FP8_BITS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """One program a (tile of queries, GROUP heads): keys that all rows see, and the diagonal.

    SPLIT: tiles are items of `SplitRows`, whose keys alone go into partial results, as in `attend_query_tiles`.
    """
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    GROUPS: tl.constexpr = (NUM_HEADS + GROUP - 1) // GROUP
    LAYER_STRIDE: tl.constexpr = BLOCK_SIZE * (RANK + ROPE)
    BLOCK_STRIDE: tl.constexpr = NUM_LAYERS * LAYER_STRIDE
    i_tile, i_group = tl.program_id(0) // GROUPS, tl.program_id(0) % GROUPS
    p_tile = tiles + i_tile * (6 if SPLIT else 2)
    i_span, i_token = tl.load(p_tile), tl.load(p_tile + 1)
    p_span = spans + i_span * 3
    i_row, num_rows, position = tl.load(p_span).to(tl.int64), tl.load(p_span + 1), tl.load(p_span + 2)
    p_table = block_tables + i_span.to(tl.int64) * table_width
    p_kv = kv + layer.to(tl.int64) * LAYER_STRIDE

    o_m, o_c, o_r = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_R)
    o_token = i_token + o_m // GROUP  # [BLOCK_M]
    o_head = i_group * GROUP + o_m % GROUP
    m_m = (o_m < TOKENS * GROUP) & (o_token < num_rows) & (o_head < NUM_HEADS)
    m_c = m_m[:, None] & (o_c < RANK)[None, :]
    p_q = q + (i_row + o_token)[:, None] * stride_q_row + o_head[:, None] * stride_q_head
    b_qc = tl.load(p_q + o_c[None, :], mask=m_c, other=0.0)
    b_qr = tl.load(p_q + RANK + o_r[None, :], mask=m_m[:, None] & (o_r < ROPE)[None, :], other=0.0)

    first, last = position + i_token, position + tl.minimum(i_token + TOKENS, num_rows) - 1  # the tile's tokens
    high = tl.minimum(position + o_token, last)[:, None] + 1  # [BLOCK_M, 1]: a row sees keys 0 .. high - 1
    diagonal = (first + 1) // BLOCK_N * BLOCK_N
    end = last + 1
    begin = 0
    stop = end
    if SPLIT:
        begin, diagonal, stop = within_split(p_tile, 0), within_split(p_tile, diagonal), within_split(p_tile, end)

    b_m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    b_l = tl.zeros([BLOCK_M], tl.float32)
    b_acc = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
    for i_n in tl.range(begin, diagonal, BLOCK_N, num_stages=STAGES):
        b_m, b_l, b_acc = attend_latents(
            b_qc, b_qr, b_m, b_l, b_acc, p_kv, p_table, i_n, end, high, scale,
            BLOCK_STRIDE, BLOCK_SIZE, RANK, ROPE, BLOCK_C, BLOCK_R, BLOCK_N, FP8_BITS, False,
        )  # fmt: skip
    for i_n in tl.range(diagonal, stop, BLOCK_N, num_stages=1):
        b_m, b_l, b_acc = attend_latents(
            b_qc, b_qr, b_m, b_l, b_acc, p_kv, p_table, i_n, end, high, scale,
            BLOCK_STRIDE, BLOCK_SIZE, RANK, ROPE, BLOCK_C, BLOCK_R, BLOCK_N, FP8_BITS, True,
        )  # fmt: skip

    if SPLIT:
        store_partials(partial, lse, p_tile, o_token - i_token, o_head, b_m, b_l, b_acc, m_m, m_c, NUM_HEADS, RANK)
    else:
        p_out = out + ((i_row + o_token) * NUM_HEADS + o_head)[:, None] * RANK + o_c[None, :]
        tl.store(p_out, rounded(b_acc / b_l[:, None] * v_scale, out.dtype.element_ty), mask=m_c)


def latent_attention(
    q: Tensor, kv: Tensor, layer: int, plan: GPUPlan, scores: Scores, out: Tensor, *, split: bool
) -> None:
    """Rows of the plan's spans into out [T, num_heads, rank], contiguous. ValueError for what latents do not have."""
    if scores.window or scores.softcap or scores.sinks is not None:
        raise ValueError("attention over latents has no window, no softcap and no sinks")
    if plan.single and plan.num_spans:
        _decode(q, kv, layer, plan, scores, out)
    if plan.wide:
        _prefill(q, kv, layer, plan, scores, out, split)


def _decode(q: Tensor, kv: Tensor, layer: int, plan: GPUPlan, scores: Scores, out: Tensor) -> None:
    heads, rank = out.shape[1:]
    config = decode_config(q.dtype, chip_of(q.device))
    work = plan.decode_work(0)
    places = plan.num_places
    partial = torch.empty((places, heads, rank), dtype=torch.float32, device=q.device)
    lse = torch.empty((places, heads), dtype=torch.float32, device=q.device)
    grid = (plan.num_spans + places) * triton.cdiv(heads, config.rows)
    attend_latent_splits[(grid,)](
        q, scores.storage(kv), plan.block_tables, plan.spans, work.items, work.total, partial, lse, out,
        layer, plan.width, scores.scale, scores.v_scale, q.stride(0), q.stride(1),
        NUM_LAYERS=kv.shape[1], NUM_HEADS=heads, BLOCK_G=config.rows, STAGES=config.stages,
        **_sizes(kv, rank, config.tile, scores.fp8_bits), num_warps=config.warps, enable_fp_fusion=False,
    )  # fmt: skip
    if places:
        combine(plan.spans, work.splits, partial, lse, scores, out)


def _prefill(q: Tensor, kv: Tensor, layer: int, plan: GPUPlan, scores: Scores, out: Tensor, split: bool) -> None:
    heads, rank = out.shape[1:]
    config = prefill_config(q.dtype, chip_of(q.device))
    group = min(heads, config.rows)
    groups = triton.cdiv(heads, group)
    work = plan.query_work(Tiling(config.rows // group, groups, heads), 0, split=split)

    def attend(tiles: Tensor, partial: Tensor | None, lse: Tensor | None) -> None:
        attend_latent_tiles[(len(tiles) * groups,)](
            q, scores.storage(kv), plan.block_tables, plan.spans, tiles, partial, lse, out,
            layer, plan.width, scores.scale, scores.v_scale, q.stride(0), q.stride(1),
            NUM_LAYERS=kv.shape[1], NUM_HEADS=heads, GROUP=group, BLOCK_M=config.rows, STAGES=config.stages,
            SPLIT=partial is not None, **_sizes(kv, rank, config.tile, scores.fp8_bits), num_warps=config.warps,
            enable_fp_fusion=False,
        )  # fmt: skip

    run_query_work(work, attend, scores, out)


def _sizes(kv: Tensor, rank: int, tile: int, fp8_bits: bool) -> dict[str, int | bool]:
    rope = kv.shape[5] - rank
    return {
        **{"BLOCK_SIZE": kv.shape[3], "RANK": rank, "ROPE": rope, "BLOCK_N": tile, "FP8_BITS": fp8_bits},
        **{"BLOCK_C": max(16, triton.next_power_of_2(rank)), "BLOCK_R": max(16, triton.next_power_of_2(rope))},
    }
