"""Copies of KV blocks to and from a contiguous transfer buffer, either unchanged or quantised to 8 bits.

A block in a buffer is one row of bytes. Without quantisation, these are the bytes of the block. Quantised, they are

    e4m3 [layer][kv_head][slot][K|V][head_dim], float32 scales [layer][kv_head][K|V], zeros up to a multiple of 16 bytes

(latents have no K|V dimension)

and an element's value is its e4m3 times its scale. A scale is the largest magnitude in its range / 448, and at least
2^-100. All backends write the same bytes. All elements of a block must be finite, including those in unused slots.

The sum of a block is the sum of its 8-byte words, each mixed with its index (degski's 64-bit mixer: two rounds of
x ^= x >> 32, x *= 0xD6E8FEB86659FD93, and a final shift; the word at index i starts as
w + (i + 1) * 0x9E3779B97F4A7C15). Additions commute, so a GPU computes the same sum in parallel as a CPU. The sum
detects accidental corruption, such as writes by another request; it does not protect against deliberate collisions.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernels.backends import backend
from kernels.interface.host_copies import ALIGN_BYTES

WORD_BYTES = 8
"""Size of the words that a block sum adds."""


def wire_bytes(kv: Tensor, *, quantised: bool = False) -> int:
    """Return the size of one block of this cache in a transfer buffer, in bytes."""
    shape = kv.shape[1:]
    if not quantised:
        return math.prod(shape) * kv.dtype.itemsize
    size = math.prod(shape) + shape[0] * shape[1] * shape[3] * torch.float32.itemsize
    return -(-size // ALIGN_BYTES) * ALIGN_BYTES


def gather_blocks(kv: Tensor, block_ids: Tensor, *, quantised: bool = False, out: Tensor | None = None) -> Tensor:
    """Copies blocks block_ids (int64 [n], on kv's device) to a buffer: uint8 [n, wire_bytes], `out` if it is given.

    ValueError if `out` does not fit or this cache is not quantised. On a GPU nothing waits for the copy.
    """
    if out is None:
        width = wire_bytes(kv, quantised=quantised)
        out = torch.empty((block_ids.shape[0], width), dtype=torch.uint8, device=kv.device)
    _check(out, kv, block_ids, quantised)
    backend(kv.device.type).gather_blocks(kv, block_ids, out, quantised)
    return out


def scatter_blocks(buffer: Tensor, kv: Tensor, block_ids: Tensor, *, quantised: bool = False) -> None:
    """Copies the rows of a buffer that `gather_blocks` filled, on kv's device, to blocks block_ids, each named once.

    ValueError as above. On a GPU nothing waits for the copy.
    """
    _check(buffer, kv, block_ids, quantised)
    backend(kv.device.type).scatter_blocks(buffer, kv, block_ids, quantised)


def block_sums(kv: Tensor, block_ids: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The sums of blocks block_ids (int64 [n], on kv's device), int64 [n]: `out` if it is given.

    ValueError if a block is no whole number of words. On a GPU nothing waits for them.
    """
    if wire_bytes(kv) % WORD_BYTES:
        raise ValueError(f"a block of {wire_bytes(kv)} bytes is no whole number of words of {WORD_BYTES}")
    if out is None:
        out = torch.empty_like(block_ids)
    backend(kv.device.type).block_sums(kv, block_ids, out)
    return out


def _check(buffer: Tensor, kv: Tensor, block_ids: Tensor, quantised: bool) -> None:
    """Raise ValueError unless `buffer` is contiguous uint8 [n, wire_bytes] and `kv` supports `quantised`."""
    expected = [block_ids.shape[0], wire_bytes(kv, quantised=quantised)]
    if buffer.dtype != torch.uint8 or list(buffer.shape) != expected or not buffer.is_contiguous():
        raise ValueError(f"the buffer is {buffer.dtype} {list(buffer.shape)}, expected contiguous uint8 {expected}")
    if quantised and kv.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"a cache of {kv.dtype} is not quantised on the wire")
