"""Plain torch implementation of KV block copies and sums (`kernels.blocks`)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernels.interface import LARGEST_FP8, LEAST_SCALE

ODD, MIX = 0x9E3779B97F4A7C15 - 2**64, 0xD6E8FEB86659FD93 - 2**64
"""Signed, because torch multiplies signed integers. The product has the same bits."""
PIECE = 32_767
"""Elements per operation. Just below torch's threshold for multithreading, to leave the cores to concurrent steps."""


def gather_blocks(kv: Tensor, block_ids: Tensor, buffer: Tensor, quantised: bool) -> None:
    """Implements `Kernels.gather_blocks` on any device."""
    if not quantised:
        buffer.copy_(kv[block_ids].flatten(1).view(torch.uint8))
        return
    heads, numbers, end = _by_heads(kv)
    pieces = _pieces(heads)
    for row, index in zip(buffer, block_ids.tolist(), strict=True):
        block = heads[index]  # [layers * heads, slots, 2, D]
        small = row[:numbers].view(torch.float8_e4m3fn).view(block.shape)
        most = torch.zeros(block.shape[0], block.shape[2], dtype=torch.float32, device=kv.device)
        for piece in pieces:
            most[piece[0]] = torch.maximum(most[piece[0]], block[piece].float().abs().amax((1, 3)))
        # A tensor, because torch on a GPU divides by a number with its inverse, which may change the last bit.
        scales = (most / torch.full_like(most, LARGEST_FP8)).clamp(min=LEAST_SCALE)
        inverse = (1.0 / scales)[:, None, :, None]
        for piece in pieces:
            small[piece] = block[piece].float() * inverse[piece[0]]
        row[numbers:end] = scales.flatten().view(torch.uint8)
        row[end:] = 0


def scatter_blocks(buffer: Tensor, kv: Tensor, block_ids: Tensor, quantised: bool) -> None:
    """Implements `Kernels.scatter_blocks` on any device."""
    if not quantised:
        kv[block_ids] = buffer.view(kv.dtype).view(buffer.shape[0], *kv.shape[1:])
        return
    heads, numbers, end = _by_heads(kv)
    pieces = _pieces(heads)
    for row, index in zip(buffer, block_ids.tolist(), strict=True):
        block = heads[index]  # [layers * heads, slots, 2, D]
        small = row[:numbers].view(torch.int8).view(block.shape)
        scales = (row[numbers:end].clone().view(torch.float32).view(-1, block.shape[2]) * 256.0)[:, None, :, None]
        for piece in pieces:
            block[piece] = _widened(small[piece]) * scales[piece[0]]


def block_sums(kv: Tensor, block_ids: Tensor, out: Tensor) -> None:
    """Implements `Kernels.block_sums` on any device."""
    words = kv.view(kv.shape[0], -1).view(torch.int64)
    places = torch.arange(1, words.shape[1] + 1, device=kv.device) * ODD
    for row, index in enumerate(block_ids.tolist()):
        mixed = words[index] + places
        for _ in range(2):
            mixed = (mixed ^ _upper(mixed)) * MIX
        out[row] = (mixed ^ _upper(mixed)).sum()


def _upper(words: Tensor) -> Tensor:
    """Return the upper 32 of 64 bits as an unsigned value."""
    return (words >> 32) & 0xFFFFFFFF


def _by_heads(kv: Tensor) -> tuple[Tensor, int, int]:
    """Return the cache as [blocks, layers * heads, slots, 2, D], and the ends of a row's numbers and scales."""
    heads = kv.view(kv.shape[0], -1, *kv.shape[3:])
    numbers = math.prod(kv.shape[1:])
    return heads, numbers, numbers + heads.shape[1] * heads.shape[3] * torch.float32.itemsize


def _pieces(heads: Tensor) -> list[tuple[slice, slice]]:
    """Return ranges of heads and slots of a block with at most PIECE numbers, which fit into a core's cache."""
    _, num_heads, num_slots, kinds, dim = heads.shape
    slots = min(num_slots, max(1, PIECE // (kinds * dim)))
    step = max(1, PIECE // (num_slots * kinds * dim))
    return [
        (slice(head, head + step), slice(slot, slot + slots))
        for head in range(0, num_heads, step)
        for slot in range(0, num_slots, slots)
    ]


def _widened(small: Tensor) -> Tensor:
    """Convert finite e4m3 numbers, given as int8, to float32, divided by 256. Eight times as fast on a CPU as torch.

    The bits of exponent and mantissa are those of a float16 with three bits less of exponent bias: 7 instead of 15.
    """
    bits = small.to(torch.int16)
    return (((bits & 0x7F) << 7) | (bits & -0x8000)).view(torch.float16).float()
