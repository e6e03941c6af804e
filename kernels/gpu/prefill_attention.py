"""Causal attention for several query rows per sequence, including the blocks of a cached prefix.

FlashAttention-2 (arXiv 2307.08691) in base 2. A query tile is tokens x query heads of one KV head, so the heads of a
group share one read of the keys. Key tiles are aligned to multiples of their size from the sequence's first token, and
tiles without visible keys do not change a row. Results are therefore bitwise independent of the rest of the batch.

Results are also independent of how a prompt is split into chunks, with two exceptions. For a small chunk after many
keys, separate programs process splits of the keys (`query_work`), and `reduce_splits` sums their results in order. A
chunk of one row uses `decode_attention`, whose summation order also differs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.decode_attention import combine, store_partials, within_split
from kernels.gpu.device_plan import GPUPlan
from kernels.gpu.query_work import QueryWork, Tiling
from kernels.gpu.scores import Scores
from kernels.gpu.tiles.chip import Chip, chip_of
from kernels.gpu.tiles.key_box import attend_box, key_boxes
from kernels.gpu.tiles.key_tile import attend_tile, with_sink
from kernels.gpu.tiles.rounding import rounded


class PrefillConfig(NamedTuple):
    """rows: tokens x heads of a query tile; tile: keys per step; stages: of the pipelined loop over tiles.

    boxes: copy keys and values with TMA where supported (`key_box.refusal`). Not yet shown to be faster.
    """

    rows: int
    tile: int
    warps: int
    stages: int
    boxes: bool = False


def prefill_config(head_dim: int, dtype: torch.dtype, chip: Chip) -> PrefillConfig:
    """Choose the configuration for queries of `dtype` on a chip.

    At least 128 rows are needed to avoid a bottleneck in the L2 cache: with 64 rows, keys and values are read twice as
    often. Hopper's matrix instructions use two groups of four warps with 64 rows each.
    """
    if dtype == torch.float32:  # exact products, on the ordinary cores with all operands in registers: for tests
        return PrefillConfig(rows=16, tile=16, warps=8, stages=2)
    if chip.vendor == "amd":
        if head_dim > 128:
            return PrefillConfig(rows=64, tile=32, warps=4, stages=2)
        return PrefillConfig(rows=128, tile=32, warps=8, stages=2)
    if not chip.multiplies_by_warpgroup:  # a warp keeps its share of the keys in registers: larger tiles spill
        if head_dim > 128:
            return PrefillConfig(rows=64, tile=32, warps=8, stages=3)
        return PrefillConfig(rows=128, tile=32, warps=8, stages=2 if chip.has_little_memory else 3)
    if head_dim > 128:
        return PrefillConfig(rows=128, tile=32, warps=8, stages=3)
    return PrefillConfig(rows=128, tile=64, warps=8, stages=5)


@triton.jit
def attend_keys(
    b_q, b_m, b_l, b_acc, kv, boxes, i_layer_head, p_table, start, begin, end, low, high, scale, softcap,
    LAYER_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, SOFTCAP: tl.constexpr, FP8_BITS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """A tile of keys: by `boxes`, or by pointers where that is None."""
    if boxes is not None:
        return attend_box(
            b_q, b_m, b_l, b_acc, boxes, i_layer_head * BLOCK_SIZE, p_table, start, begin, end, low, high, scale,
            softcap, LAYER_HEADS * BLOCK_SIZE, BLOCK_SIZE, BLOCK_D, BLOCK_N, SOFTCAP, MASKED,
        )  # fmt: skip
    else:
        HEAD_STRIDE: tl.constexpr = BLOCK_SIZE * 2 * HEAD_DIM
        return attend_tile(
            b_q, b_m, b_l, b_acc, kv + i_layer_head.to(tl.int64) * HEAD_STRIDE, p_table, start, begin, end, low, high,
            scale, softcap, LAYER_HEADS * HEAD_STRIDE, BLOCK_SIZE, HEAD_DIM, BLOCK_D, BLOCK_N, SOFTCAP, FP8_BITS,
            MASKED,
        )  # fmt: skip


@triton.jit(do_not_specialize=["layer", "table_width", "window"])
def attend_query_tiles(
    q, kv, boxes, block_tables, spans, tiles, sinks, partial, lse, out,
    layer, table_width, window, scale, softcap, v_scale, stride_q_row, stride_q_head,
    NUM_LAYERS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, FP8_BITS: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """One program a (tile of queries, KV head): keys that some rows do not see, those that all do, and the diagonal.

    boxes: None, or the cache as `key_boxes` describes it, whose `kv` is then not read. SPLIT: tiles are items of
    `SplitRows`, whose keys alone go into partial results float32 [places, heads, D], each already divided by its sum,
    and lse [places, heads], the base 2 logarithm of that sum; zeros and -inf for a row that sees none of them.
    """
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    LAYER_HEADS: tl.constexpr = NUM_LAYERS * NUM_KV_HEADS
    i_tile, i_head = tl.program_id(0) // NUM_KV_HEADS, tl.program_id(0) % NUM_KV_HEADS
    p_tile = tiles + i_tile * (6 if SPLIT else 2)
    i_span, i_token = tl.load(p_tile), tl.load(p_tile + 1)
    p_span = spans + i_span * 3
    i_row, num_rows, position = tl.load(p_span).to(tl.int64), tl.load(p_span + 1), tl.load(p_span + 2)
    p_table = block_tables + i_span.to(tl.int64) * table_width
    i_layer_head = layer * NUM_KV_HEADS + i_head

    o_m, o_d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    o_token = i_token + o_m // GROUP  # [BLOCK_M]
    o_head = i_head * GROUP + o_m % GROUP
    m_m = (o_m < TOKENS * GROUP) & (o_token < num_rows)
    m_q = m_m[:, None] & (o_d < HEAD_DIM)[None, :]
    p_q = q + (i_row + o_token)[:, None] * stride_q_row + o_head[:, None] * stride_q_head + o_d[None, :]
    b_q = tl.load(p_q, mask=m_q, other=0.0)

    first, last = position + i_token, position + tl.minimum(i_token + TOKENS, num_rows) - 1  # the tile's tokens
    high = tl.minimum(position + o_token, last)[:, None] + 1  # [BLOCK_M, 1]: a row sees keys low .. high - 1
    low = high - high
    begin = 0
    start = 0
    whole = 0  # tiles of keys from here to `diagonal` are seen by all rows
    if WINDOW:
        low = tl.maximum(high - window, 0)
        begin = tl.maximum(first + 1 - window, 0)
        start = begin // BLOCK_N * BLOCK_N
        whole = (tl.maximum(last + 1 - window, 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    diagonal = tl.maximum((first + 1) // BLOCK_N * BLOCK_N, whole)
    end = last + 1
    stop = end
    if SPLIT:  # its keys begin and end at multiples of a tile, or beyond those that the rows see
        start, whole = within_split(p_tile, start), within_split(p_tile, whole)
        diagonal, stop = within_split(p_tile, diagonal), within_split(p_tile, end)

    b_m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    b_l = tl.zeros([BLOCK_M], tl.float32)
    b_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if WINDOW:
        for i_n in tl.range(start, tl.minimum(whole, end), BLOCK_N, num_stages=1):
            b_m, b_l, b_acc = attend_keys(
                b_q, b_m, b_l, b_acc, kv, boxes, i_layer_head, p_table, i_n, begin, end, low, high, scale, softcap,
                LAYER_HEADS, BLOCK_SIZE, HEAD_DIM, BLOCK_D, BLOCK_N, SOFTCAP, FP8_BITS, True,
            )  # fmt: skip
    for i_n in tl.range(whole, diagonal, BLOCK_N, num_stages=STAGES):
        b_m, b_l, b_acc = attend_keys(
            b_q, b_m, b_l, b_acc, kv, boxes, i_layer_head, p_table, i_n, begin, end, low, high, scale, softcap,
            LAYER_HEADS, BLOCK_SIZE, HEAD_DIM, BLOCK_D, BLOCK_N, SOFTCAP, FP8_BITS, False,
        )  # fmt: skip
    for i_n in tl.range(diagonal, stop, BLOCK_N, num_stages=1):
        b_m, b_l, b_acc = attend_keys(
            b_q, b_m, b_l, b_acc, kv, boxes, i_layer_head, p_table, i_n, begin, end, low, high, scale, softcap,
            LAYER_HEADS, BLOCK_SIZE, HEAD_DIM, BLOCK_D, BLOCK_N, SOFTCAP, FP8_BITS, True,
        )  # fmt: skip

    if SPLIT:
        NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
        store_partials(partial, lse, p_tile, o_token - i_token, o_head, b_m, b_l, b_acc, m_m, m_q, NUM_HEADS, HEAD_DIM)
    else:
        if SINKS:
            b_sink = tl.load(sinks + o_head, mask=m_m, other=float("-inf"))
            b_l, b_acc = with_sink(b_m, b_l, b_acc, b_sink)
        b_out = b_acc / b_l[:, None] * v_scale
        p_out = out + ((i_row + o_token) * (NUM_KV_HEADS * GROUP) + o_head)[:, None] * HEAD_DIM + o_d[None, :]
        tl.store(p_out, rounded(b_out, out.dtype.element_ty), mask=m_q)


def prefill_attention(
    q: Tensor, kv: Tensor, layer: int, plan: GPUPlan, scores: Scores, out: Tensor, *, split: bool
) -> None:
    """Rows of the plan's spans of several rows into out [T, num_heads, head_dim], contiguous. One launch, and two for
    each round of chunks that are split, if chunks may be."""
    _, num_layers, kv_heads, block_size, _, dim = kv.shape
    heads = q.shape[1]
    group = heads // kv_heads
    chip = chip_of(q.device)
    config = prefill_config(dim, q.dtype, chip)
    rows = max(config.rows, triton.next_power_of_2(group))
    work = plan.query_work(Tiling(rows // group, kv_heads, heads), scores.window, split=split)

    def attend(tiles: Tensor, partial: Tensor | None, lse: Tensor | None) -> None:
        attend_query_tiles[(len(tiles) * kv_heads,)](
            q, scores.storage(kv), key_boxes(kv, config.tile, chip) if config.boxes else None, plan.block_tables,
            plan.spans, tiles, scores.sinks, partial, lse, out, layer, plan.width, scores.window, scores.scale,
            scores.softcap, scores.v_scale, q.stride(0), q.stride(1),
            NUM_LAYERS=num_layers, NUM_KV_HEADS=kv_heads, GROUP=group, BLOCK_SIZE=block_size, HEAD_DIM=dim,
            BLOCK_D=max(16, triton.next_power_of_2(dim)), BLOCK_M=rows, BLOCK_N=config.tile, STAGES=config.stages,
            WINDOW=scores.window > 0, SOFTCAP=scores.softcap > 0, SINKS=scores.sinks is not None,
            FP8_BITS=scores.fp8_bits, SPLIT=partial is not None, num_warps=config.warps, enable_fp_fusion=False,
        )  # fmt: skip

    run_query_work(work, attend, scores, out)


def run_query_work(
    work: QueryWork, attend: Callable[[Tensor, Tensor | None, Tensor | None], None], scores: Scores, out: Tensor
) -> None:
    """Has `attend` launch whole tiles, and items with room for their partial results, which are then summed up."""
    if len(work.tiles):
        attend(work.tiles, None, None)
    if work.rounds:
        heads, dim = out.shape[1:]
        partial = torch.empty((work.places, heads, dim), dtype=torch.float32, device=out.device)
        lse = torch.empty((work.places, heads), dtype=torch.float32, device=out.device)
        for part in work.rounds:
            attend(part.items, partial, lse)
            combine(part.rows, part.splits, partial, lse, scores, out)
