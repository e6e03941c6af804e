"""KV blocks into and out of a transfer buffer, in the formats of `kernels.blocks`, to the byte, and their sums."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.tiles.key_tile import dequantised
from kernels.gpu.tiles.rounding import e4m3_bits, rounded
from kernels.interface import LARGEST_FP8, LEAST_SCALE

WORDS = 2048  # that a program copies, of 4 bytes, or adds up, of 8
TILE = 4096  # numbers that a program holds while it quantises


@triton.jit(do_not_specialize_on_alignment=["block_ids"])
def copy_words(kv, buffer, block_ids, num_words, TO_BUFFER: tl.constexpr, BLOCK: tl.constexpr):
    """Program (i, j) copies the j-th piece of block block_ids[i] to or from row i of the buffer; int32 both."""
    i_row = tl.program_id(0).to(tl.int64)
    i_block = tl.load(block_ids + i_row).to(tl.int64)
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    p_kv, p_buffer = kv + i_block * num_words + o, buffer + i_row * num_words + o
    if TO_BUFFER:
        tl.store(p_buffer, tl.load(p_kv, mask=o < num_words), mask=o < num_words)
    else:
        tl.store(p_kv, tl.load(p_buffer, mask=o < num_words), mask=o < num_words)


@triton.jit(do_not_specialize_on_alignment=["block_ids"])
def quantise_heads(
    kv, buffer, scales, block_ids, row_bytes, largest, least_scale,
    NUMBERS: tl.constexpr, HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, KINDS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_SLOTS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Program (i, h, K or V): a layer's head of block block_ids[i]. KINDS: 2, of latents 1. HEADS counts those of all
    layers, NUMBERS is a block's. `buffer` uint8 and `scales` float32 point at the same memory."""
    i_row, i_head, i_kind = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    i_block = tl.load(block_ids + i_row).to(tl.int64)
    first = i_head * (BLOCK_SIZE * KINDS * HEAD_DIM) + i_kind * HEAD_DIM
    p_from, p_to = kv + i_block * NUMBERS + first, buffer + i_row * row_bytes + first
    o_slot, o_d = tl.arange(0, BLOCK_SLOTS), tl.arange(0, BLOCK_D)
    o = o_slot[:, None] * (KINDS * HEAD_DIM) + o_d[None, :]  # [BLOCK_SLOTS, BLOCK_D]
    b_most = tl.zeros([BLOCK_SLOTS, BLOCK_D], tl.float32)
    for start in range(0, BLOCK_SIZE, BLOCK_SLOTS):
        m = (start + o_slot < BLOCK_SIZE)[:, None] & (o_d < HEAD_DIM)[None, :]
        b_x = tl.load(p_from + start * (KINDS * HEAD_DIM) + o, mask=m, other=0.0).to(tl.float32)
        b_most = tl.maximum(b_most, tl.abs(b_x))
    scale = tl.maximum(tl.div_rn(tl.max(b_most), largest), least_scale)
    inverse = tl.div_rn(1.0, scale)
    tl.store(scales + i_row * (row_bytes // 4) + NUMBERS // 4 + i_head * KINDS + i_kind, scale)
    for start in range(0, BLOCK_SIZE, BLOCK_SLOTS):
        m = (start + o_slot < BLOCK_SIZE)[:, None] & (o_d < HEAD_DIM)[None, :]
        b_x = tl.load(p_from + start * (KINDS * HEAD_DIM) + o, mask=m, other=0.0).to(tl.float32)
        tl.store(p_to + start * (KINDS * HEAD_DIM) + o, e4m3_bits(b_x * inverse), mask=m)
    if (i_head == 0) & (i_kind == 0):
        end = NUMBERS // 4 + HEADS * KINDS + tl.arange(0, 4)
        tl.store(scales + i_row * (row_bytes // 4) + end, tl.zeros([4], tl.float32), mask=end < row_bytes // 4)


@triton.jit(do_not_specialize_on_alignment=["block_ids"])
def dequantise_heads(
    kv, buffer, scales, block_ids, row_bytes,
    NUMBERS: tl.constexpr, HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, KINDS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_SLOTS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The way back; programs as above."""
    i_row, i_head, i_kind = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    i_block = tl.load(block_ids + i_row).to(tl.int64)
    first = i_head * (BLOCK_SIZE * KINDS * HEAD_DIM) + i_kind * HEAD_DIM
    p_from, p_to = buffer + i_row * row_bytes + first, kv + i_block * NUMBERS + first
    o_slot, o_d = tl.arange(0, BLOCK_SLOTS), tl.arange(0, BLOCK_D)
    o = o_slot[:, None] * (KINDS * HEAD_DIM) + o_d[None, :]  # [BLOCK_SLOTS, BLOCK_D]
    scale = tl.load(scales + i_row * (row_bytes // 4) + NUMBERS // 4 + i_head * KINDS + i_kind)
    for start in range(0, BLOCK_SIZE, BLOCK_SLOTS):
        m = (start + o_slot < BLOCK_SIZE)[:, None] & (o_d < HEAD_DIM)[None, :]
        b_x = tl.load(p_from + start * (KINDS * HEAD_DIM) + o, mask=m, other=0)
        b_x = dequantised(b_x, tl.float32, True) * scale
        tl.store(p_to + start * (KINDS * HEAD_DIM) + o, rounded(b_x, kv.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize_on_alignment=["block_ids"])
def mix_words(kv, sums, block_ids, num_words, BLOCK: tl.constexpr):
    """Program (i, j) writes the sum of the j-th piece of block block_ids[i]; int64 words."""
    i_row, i_piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_block = tl.load(block_ids + i_row).to(tl.int64)
    o = i_piece * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(kv + i_block * num_words + o, mask=o < num_words, other=0).to(tl.uint64, bitcast=True)
    x += (o + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 32)) * 0xD6E8FEB86659FD93
    x = (x ^ (x >> 32)) * 0xD6E8FEB86659FD93
    x ^= x >> 32
    total = tl.sum(tl.where(o < num_words, x, 0).to(tl.int64, bitcast=True))
    tl.store(sums + i_row * tl.num_programs(1) + i_piece, total)


def block_sums(kv: Tensor, block_ids: Tensor, out: Tensor) -> None:
    """As `kernels.block_sums`, into `out`."""
    if not (count := block_ids.shape[0]):
        return
    words = kv.view(kv.shape[0], -1).view(torch.int64)
    pieces = triton.cdiv(words.shape[1], WORDS)
    sums = torch.empty(count, pieces, dtype=torch.int64, device=kv.device)
    mix_words[(count, pieces)](words, sums, block_ids, words.shape[1], BLOCK=WORDS, num_warps=4)
    torch.sum(sums, 1, out=out)


def gather_blocks(kv: Tensor, block_ids: Tensor, buffer: Tensor, quantised: bool) -> None:
    """As `kernels.gather_blocks`, into `buffer`."""
    _move(kv, block_ids, buffer, quantised, to_buffer=True)


def scatter_blocks(buffer: Tensor, kv: Tensor, block_ids: Tensor, quantised: bool) -> None:
    """As `kernels.scatter_blocks`."""
    _move(kv, block_ids, buffer, quantised, to_buffer=False)


def _move(kv: Tensor, block_ids: Tensor, buffer: Tensor, quantised: bool, to_buffer: bool) -> None:
    count, row_bytes = buffer.shape
    if not count:
        return
    if not quantised:
        words = row_bytes // 4
        copy_words[(count, triton.cdiv(words, WORDS))](
            kv.view(kv.shape[0], -1).view(torch.int32), buffer.view(torch.int32), block_ids, words,
            TO_BUFFER=to_buffer, BLOCK=WORDS, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
        return
    _, layers, heads, block_size, kinds, dim = kv.shape
    slots, width = quantised_tile(block_size, dim)
    arguments = (kv, buffer, buffer.view(torch.float32), block_ids, row_bytes)
    sizes = {"NUMBERS": math.prod(kv.shape[1:]), "HEADS": layers * heads, "BLOCK_SIZE": block_size, "KINDS": kinds}
    # No fused multiply-add: the bytes must be those of a processor that rounds after each operation.
    options = {"HEAD_DIM": dim, "BLOCK_SLOTS": slots, "BLOCK_D": width, "num_warps": 4, "enable_fp_fusion": False}
    grid = (count, layers * heads, kinds)
    if to_buffer:
        quantise_heads[grid](*arguments, LARGEST_FP8, LEAST_SCALE, **sizes, **options)
    else:
        dequantise_heads[grid](*arguments, **sizes, **options)


def quantised_tile(block_size: int, head_dim: int) -> tuple[int, int]:
    """Slots and padded head size of a tile."""
    width = triton.next_power_of_2(head_dim)
    return max(1, min(triton.next_power_of_2(block_size), TILE // width)), width
