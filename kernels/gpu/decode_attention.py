"""Attention of one query row a sequence over its blocks: fixed-length splits on a persistent grid, then a reduction.

Flash-decoding's split of the keys (Dao et al. 2023) with the online softmax of FlashAttention-2 (arXiv 2307.08691) in
base 2. The query heads of a group are rows of one matrix product. A sequence of one split needs no reduction and writes
its output at once. Its splits and the order of its sums depend on its own length alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.device_plan import GPUPlan
from kernels.gpu.scores import Scores
from kernels.gpu.tiles.chip import Chip, chip_of
from kernels.gpu.tiles.key_tile import attend_tile, with_sink
from kernels.gpu.tiles.rounding import rounded

MIN_ROWS = 16  # of a matrix product on tensor cores
REDUCE_CHUNK = 8  # partial results that a program sums in one go


class DecodeConfig(NamedTuple):
    """tile: keys a step; stages: of the pipelined loop over tiles; programs: on one multiprocessor."""

    tile: int
    warps: int
    stages: int
    programs: int


def decode_config(
    head_dim: int, dtype: torch.dtype, element_bytes: int, chip: Chip, masked: bool = False
) -> DecodeConfig:
    """Choose the configuration for queries of `dtype`, a cache with `element_bytes` per number, and a chip.

    masked: a window cuts tiles, or heads are padded, which takes registers: 190 with Triton 3.6, 168 with 3.9.

    Chosen by the registers and the shared memory that the compiler reports: nothing spills, and `programs` of them fit
    on one multiprocessor. On chips with HBM 64 KB or more of keys and values are in flight, as a multiprocessor's share
    of the memory bandwidth needs. A tile is a block of 64 tokens: a program reads one entry of the block table for it.
    """
    if dtype == torch.float32:  # exact products, on the ordinary cores with all operands in registers: for tests
        return DecodeConfig(tile=16, warps=8, stages=2, programs=1)
    if chip.vendor == "amd":
        return DecodeConfig(tile=32 if element_bytes == 1 or head_dim > 128 else 64, warps=4, stages=2, programs=2)
    if chip.has_little_memory:
        tile = 32 if head_dim > 128 else 64
        if element_bytes == 1:
            return DecodeConfig(tile, warps=4, stages=5, programs=2)
        return DecodeConfig(tile, warps=4, stages=3, programs=4 if head_dim <= 64 else 2)
    if element_bytes == 1:  # half the bytes a tile, so more of them; the conversion takes registers
        return DecodeConfig(tile=32 if head_dim > 128 else 64, warps=4, stages=7, programs=2)
    if head_dim > 128:
        return DecodeConfig(tile=32, warps=4, stages=5, programs=2)
    if head_dim <= 64:
        return DecodeConfig(tile=64, warps=4, stages=5, programs=4)
    return DecodeConfig(tile=64, warps=4, stages=5, programs=3 if chip.multiplies_by_warpgroup and not masked else 2)


@triton.jit
def store_output(p_out, b_m, b_l, b_acc, m_q, sinks, o_head, m_g, v_scale, SINKS: tl.constexpr):
    """The output of a sequence of one split, [BLOCK_G, BLOCK_D]."""
    if SINKS:
        b_sink = tl.load(sinks + o_head, mask=m_g, other=float("-inf"))
        b_l, b_acc = with_sink(b_m, b_l, b_acc, b_sink)
    b_out = b_acc / b_l[:, None] * v_scale
    tl.store(p_out, rounded(b_out, p_out.dtype.element_ty), mask=m_q)


@triton.jit(do_not_specialize=["layer", "table_width"])
def attend_splits(
    q, kv, block_tables, spans, items, total, sinks, partial, lse, out,
    layer, table_width, scale, softcap, v_scale, stride_q_row, stride_q_head,
    NUM_LAYERS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, FP8_BITS: tl.constexpr,
):  # fmt: skip
    """A program walks over the work list, a KV head at a time. Partial results are float32 [places, heads, D], each
    already divided by its sum, and lse [places, heads] is the base 2 logarithm of that sum."""
    HEAD_STRIDE: tl.constexpr = BLOCK_SIZE * 2 * HEAD_DIM
    BLOCK_STRIDE: tl.constexpr = NUM_LAYERS * NUM_KV_HEADS * HEAD_STRIDE
    o_g, o_d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    m_g = o_g < GROUP
    m_q = m_g[:, None] & (o_d < HEAD_DIM)[None, :]  # [BLOCK_G, BLOCK_D]
    for i_work in tl.range(tl.program_id(0), tl.load(total) * NUM_KV_HEADS, tl.num_programs(0)):
        i_head = i_work % NUM_KV_HEADS
        p_item = items + i_work // NUM_KV_HEADS * 4
        i_span, begin, end, i_place = tl.load(p_item), tl.load(p_item + 1), tl.load(p_item + 2), tl.load(p_item + 3)
        i_row = tl.load(spans + i_span * 3).to(tl.int64)
        o_head = i_head * GROUP + o_g  # [BLOCK_G]
        b_q = tl.load(q + i_row * stride_q_row + o_head[:, None] * stride_q_head + o_d[None, :], mask=m_q, other=0.0)
        p_table = block_tables + i_span.to(tl.int64) * table_width
        p_kv = kv + (layer * NUM_KV_HEADS + i_head).to(tl.int64) * HEAD_STRIDE

        b_m = tl.full([BLOCK_G], float("-inf"), tl.float32)
        b_l = tl.zeros([BLOCK_G], tl.float32)
        b_acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
        first = begin // BLOCK_N * BLOCK_N
        last = end // BLOCK_N * BLOCK_N
        if WINDOW and first < begin:  # the window begins inside of a tile
            b_m, b_l, b_acc = attend_tile(
                b_q, b_m, b_l, b_acc, p_kv, p_table, first, begin, end, begin, end, scale, softcap,
                BLOCK_STRIDE, BLOCK_SIZE, HEAD_DIM, BLOCK_D, BLOCK_N, SOFTCAP, FP8_BITS, True,
            )  # fmt: skip
            first += BLOCK_N
        for start in tl.range(first, last, BLOCK_N, num_stages=STAGES):
            b_m, b_l, b_acc = attend_tile(
                b_q, b_m, b_l, b_acc, p_kv, p_table, start, begin, end, begin, end, scale, softcap,
                BLOCK_STRIDE, BLOCK_SIZE, HEAD_DIM, BLOCK_D, BLOCK_N, SOFTCAP, FP8_BITS, False,
            )  # fmt: skip
        last = tl.maximum(first, last)
        if last < end:
            b_m, b_l, b_acc = attend_tile(
                b_q, b_m, b_l, b_acc, p_kv, p_table, last, begin, end, begin, end, scale, softcap,
                BLOCK_STRIDE, BLOCK_SIZE, HEAD_DIM, BLOCK_D, BLOCK_N, SOFTCAP, FP8_BITS, True,
            )  # fmt: skip

        if i_place >= 0:
            o_place = i_place.to(tl.int64) * (NUM_KV_HEADS * GROUP) + o_head
            tl.store(partial + o_place[:, None] * HEAD_DIM + o_d[None, :], b_acc / b_l[:, None], mask=m_q)
            tl.store(lse + o_place, b_m + tl.log2(b_l), mask=m_g)
        else:
            p_out = out + (i_row * (NUM_KV_HEADS * GROUP) + o_head)[:, None] * HEAD_DIM + o_d[None, :]
            store_output(p_out, b_m, b_l, b_acc, m_q, sinks, o_head, m_g, v_scale, SINKS)


@triton.jit
def within_split(p_item, key):
    """`key`, or the nearest end of the keys of an item of `SplitRows`."""
    return tl.minimum(tl.maximum(key, tl.load(p_item + 2)), tl.load(p_item + 3))


@triton.jit
def store_partials(
    partial, lse, p_item, o_row, o_head, b_m, b_l, b_acc, m_row, m_q, NUM_HEADS: tl.constexpr, DIM: tl.constexpr
):
    """What rows o_row [M] of an item's tile, heads o_head [M], saw of its keys: zeros, which weigh nothing, if none."""
    o_d = tl.arange(0, b_acc.shape[1])
    i_place = tl.load(p_item + 4) + o_row * tl.load(p_item + 5)
    i_place = i_place.to(tl.int64) * NUM_HEADS + o_head
    b_l = tl.where(b_l > 0.0, b_l, 1.0)
    tl.store(partial + i_place[:, None] * DIM + o_d[None, :], b_acc / b_l[:, None], mask=m_q)
    tl.store(lse + i_place, b_m + tl.log2(b_l), mask=m_row)


@triton.jit
def reduce_splits(
    spans, splits, sinks, partial, lse, out, v_scale,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """One program a (span, head). Chunks of partial results have one size for all plans, so the order of
    the sums is the sequence's own."""
    i_span, i_head = tl.program_id(0), tl.program_id(1)
    count = tl.load(splits + i_span * 2)
    if count > 1:
        o_c, o_d = tl.arange(0, CHUNK), tl.arange(0, BLOCK_D)
        m_d = o_d < HEAD_DIM
        i_first = tl.load(splits + i_span * 2 + 1).to(tl.int64) * NUM_HEADS + i_head
        b_top = tl.full([CHUNK], float("-inf"), tl.float32)
        for start in range(0, count, CHUNK):
            p_lse = lse + i_first + (start + o_c) * NUM_HEADS
            b_top = tl.maximum(b_top, tl.load(p_lse, mask=start + o_c < count, other=float("-inf")))
        top = tl.max(b_top, 0)
        if SINKS:
            sink = tl.load(sinks + i_head) * 1.4426950408889634
            top = tl.maximum(top, sink)
        b_l = tl.zeros([CHUNK], tl.float32)
        b_acc = tl.zeros([BLOCK_D], tl.float32)
        for start in range(0, count, CHUNK):
            m_c = start + o_c < count
            o_place = i_first + (start + o_c) * NUM_HEADS  # [CHUNK]
            b_weight = tl.exp2(tl.load(lse + o_place, mask=m_c, other=float("-inf")) - top)
            p_part = partial + o_place[:, None] * HEAD_DIM + o_d[None, :]
            b_part = tl.load(p_part, mask=m_c[:, None] & m_d[None, :], other=0.0)  # [CHUNK, BLOCK_D]
            b_l += b_weight
            b_acc += tl.sum(b_part * b_weight[:, None], 0)
        total = tl.sum(b_l, 0)
        if SINKS:
            total += tl.exp2(sink - top)
        i_row = tl.load(spans + i_span * 3).to(tl.int64)
        p_out = out + (i_row * NUM_HEADS + i_head) * HEAD_DIM + o_d
        tl.store(p_out, rounded(b_acc / total * v_scale, out.dtype.element_ty), mask=m_d)


def decode_attention(q: Tensor, kv: Tensor, layer: int, plan: GPUPlan, scores: Scores, out: Tensor) -> None:
    """Rows of the plan's single-row spans into out [T, num_heads, head_dim], contiguous. One or two launches."""
    _, num_layers, kv_heads, block_size, _, dim = kv.shape
    heads, padded = q.shape[1], max(16, triton.next_power_of_2(dim))
    masked = scores.window > 0 or padded != dim
    config = decode_config(dim, q.dtype, kv.element_size(), chip_of(q.device), masked)
    work = plan.decode_work(scores.window)
    places = plan.num_places
    partial = torch.empty((places, heads, dim), dtype=torch.float32, device=q.device)
    lse = torch.empty((places, heads), dtype=torch.float32, device=q.device)
    grid = min(plan.num_multiprocessors * config.programs, (plan.num_spans + places) * kv_heads)
    attend_splits[(grid,)](
        q, scores.storage(kv), plan.block_tables, plan.spans, work.items, work.total, scores.sinks, partial, lse, out,
        layer, plan.width, scores.scale, scores.softcap, scores.v_scale, q.stride(0), q.stride(1),
        NUM_LAYERS=num_layers, NUM_KV_HEADS=kv_heads, GROUP=heads // kv_heads, BLOCK_SIZE=block_size, HEAD_DIM=dim,
        BLOCK_D=padded, BLOCK_G=max(MIN_ROWS, triton.next_power_of_2(heads // kv_heads)), BLOCK_N=config.tile,
        STAGES=config.stages, WINDOW=scores.window > 0, SOFTCAP=scores.softcap > 0, SINKS=scores.sinks is not None,
        FP8_BITS=scores.fp8_bits, num_warps=config.warps, enable_fp_fusion=False,
    )  # fmt: skip
    if places:
        combine(plan.spans, work.splits, partial, lse, scores, out)


def combine(rows: Tensor, splits: Tensor, partial: Tensor, lse: Tensor, scores: Scores, out: Tensor) -> None:
    """Sums up the partial results of `rows`, which are spans of one row, into out [T, num_heads, head_dim]."""
    heads, dim = out.shape[1:]
    reduce_splits[(len(rows), heads)](
        rows, splits, scores.sinks, partial, lse, out, scores.v_scale,
        NUM_HEADS=heads, HEAD_DIM=dim, BLOCK_D=max(16, triton.next_power_of_2(dim)), CHUNK=REDUCE_CHUNK,
        SINKS=scores.sinks is not None, num_warps=2, enable_fp_fusion=False,
    )  # fmt: skip
