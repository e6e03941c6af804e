"""KV blocks into and out of a contiguous transfer buffer, as they are or as 8-bit numbers.

A block in a buffer is one row of bytes. As it is, those are the block's own. Quantised, they are

    e4m3 [layer][kv_head][slot][K|V][head_dim], float32 scales [layer][kv_head][K|V], zeros up to a multiple of 16 bytes

and a number is its e4m3 times its scale. A scale is the largest magnitude that it serves / 448, and at least 2^-100.
All backends write the same bytes. Every number of a block must be finite, those in unused slots included.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from diptych.kernels.device import triton_backend

LARGEST = 448.0  # of e4m3
LEAST_SCALE = 2.0**-100
ALIGNMENT = 16


def wire_bytes(kv: Tensor, *, quantised: bool = False) -> int:
    """Bytes that one block of this cache takes in a transfer buffer."""
    shape = kv.shape[1:]
    if not quantised:
        return math.prod(shape) * kv.dtype.itemsize
    size = math.prod(shape) + shape[0] * shape[1] * 2 * torch.float32.itemsize
    return -(-size // ALIGNMENT) * ALIGNMENT


def gather_blocks(kv: Tensor, block_ids: Tensor, *, quantised: bool = False, out: Tensor | None = None) -> Tensor:
    """Copies blocks block_ids (int64 [n], on kv's device) to a buffer: uint8 [n, wire_bytes], `out` if it is given.

    ValueError if `out` does not fit or this cache is not quantised. On a GPU nothing waits for the copy.
    """
    if out is None:
        width = wire_bytes(kv, quantised=quantised)
        out = torch.empty((block_ids.shape[0], width), dtype=torch.uint8, device=kv.device)
    _check(out, kv, block_ids, quantised)
    if (backend := triton_backend(kv.device.type)) is not None:
        backend.gather_blocks(kv, block_ids, out, quantised)
    else:
        gather_by_torch(kv, block_ids, out, quantised)
    return out


def scatter_blocks(buffer: Tensor, kv: Tensor, block_ids: Tensor, *, quantised: bool = False) -> None:
    """Copies the rows of a buffer that `gather_blocks` filled, on kv's device, to blocks block_ids, each named once.

    ValueError as above. On a GPU nothing waits for the copy.
    """
    _check(buffer, kv, block_ids, quantised)
    if (backend := triton_backend(kv.device.type)) is not None:
        backend.scatter_blocks(buffer, kv, block_ids, quantised)
    else:
        scatter_by_torch(buffer, kv, block_ids, quantised)


def _check(buffer: Tensor, kv: Tensor, block_ids: Tensor, quantised: bool) -> None:
    """ValueError unless `buffer` is contiguous uint8 [n, wire_bytes] and kv can be quantised, if it is to be."""
    expected = [block_ids.shape[0], wire_bytes(kv, quantised=quantised)]
    if buffer.dtype != torch.uint8 or list(buffer.shape) != expected or not buffer.is_contiguous():
        raise ValueError(f"the buffer is {buffer.dtype} {list(buffer.shape)}, expected contiguous uint8 {expected}")
    if quantised and kv.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"a cache of {kv.dtype} is not quantised on the wire")


def gather_by_torch(kv: Tensor, block_ids: Tensor, buffer: Tensor, quantised: bool) -> None:
    """As `gather_blocks`, on any device."""
    blocks = kv[block_ids]  # [n, layers, heads, slots, 2, D]
    if not quantised:
        buffer.copy_(blocks.flatten(1).view(torch.uint8))
        return
    wide = blocks.float()
    scales = (wide.abs().amax((3, 5)) / LARGEST).clamp(min=LEAST_SCALE)  # [n, layers, heads, 2]
    small = (wide * (1.0 / scales)[:, :, :, None, :, None]).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    numbers = math.prod(kv.shape[1:])
    end = numbers + kv.shape[1] * kv.shape[2] * 2 * scales.itemsize
    buffer[:, :numbers] = small.flatten(1).view(torch.uint8)
    buffer[:, numbers:end] = scales.flatten(1).view(torch.uint8)
    buffer[:, end:] = 0


def scatter_by_torch(buffer: Tensor, kv: Tensor, block_ids: Tensor, quantised: bool) -> None:
    """As `scatter_blocks`, on any device."""
    shape = (buffer.shape[0], *kv.shape[1:])
    if not quantised:
        kv[block_ids] = buffer.view(kv.dtype).view(shape)
        return
    _, layers, heads = shape[:3]
    numbers = math.prod(shape[1:])
    small = buffer[:, :numbers].contiguous().view(torch.float8_e4m3fn).view(shape)
    scales = buffer[:, numbers : numbers + layers * heads * 2 * 4].contiguous().view(torch.float32)
    kv[block_ids] = (small.float() * scales.view(shape[0], layers, heads, 1, 2, 1)).to(kv.dtype)
