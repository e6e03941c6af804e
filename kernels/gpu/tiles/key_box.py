"""A tile of keys and values that the tensor memory accelerator (TMA) copies, by a descriptor of the whole cache.

TMA copies a box of a tensor with a single instruction of one thread, and swizzles rows for matrix instructions. The
descriptor is created on the host and passed as an argument of the launch, so it needs no separate memory, and a
recorded launch keeps it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.gpu.tiles.chip import Chip
from kernels.gpu.tiles.key_tile import dequantised, product, weighed
from kernels.gpu.tiles.rounding import rounded

BOX_ALIGN_BYTES, LONGEST = 16, 256
"""Bytes between rows, in multiples; numbers of a box in any dimension."""
MOST_ROWS = 2**31
"""Coordinates are 32 bits."""


@triton.jit
def attend_box(
    b_q, b_m, b_l, b_acc, boxes, i_row, p_table, start, begin, end, low, high, scale, softcap,
    BLOCK_ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    SOFTCAP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """As `attend_tile`, to the bit. Row `i_row` of `boxes` is the first of a layer's head in block 0.

    A box is always read completely. Masked keys have no weight; values outside of [begin, end) are replaced by zeros.
    """
    o_n = start + tl.arange(0, BLOCK_N)
    i_box = i_row + tl.load(p_table + start // BLOCK_SIZE) * BLOCK_ROWS + start % BLOCK_SIZE
    b_k = dequantised(boxes.load([i_box, 0, 0]).reshape(BLOCK_N, BLOCK_D), b_q.dtype, False)
    b_m, b_l, b_p, b_shrink = weighed(b_q, b_m, b_l, b_k, o_n, low, high, scale, softcap, SOFTCAP, MASKED)
    b_v = dequantised(boxes.load([i_box, 1, 0]).reshape(BLOCK_N, BLOCK_D), b_q.dtype, False)
    if MASKED:
        b_v = tl.where(((o_n >= begin) & (o_n < end))[:, None], b_v, 0.0)
    return b_m, b_l, product(rounded(b_p, b_q.dtype), b_v, b_acc * b_shrink[:, None])


def key_boxes(kv: Tensor, tile: int, chip: Chip) -> TensorDescriptor | None:
    """Boxes of `tile` keys or values over the cache as rows [slots of all blocks, 2, head_dim]; None: see `refusal`.

    A box is as wide as the next power of two, and zero beyond head_dim.
    """
    if refusal(kv, tile, chip):
        return None
    dim = kv.shape[-1]
    return TensorDescriptor.from_tensor(kv.view(-1, 2, dim), [tile, 1, triton.next_power_of_2(dim)])


def refusal(kv: Tensor, tile: int, chip: Chip) -> str:
    """Return why a chip cannot copy this cache by boxes, or ""."""
    block_size, dim = kv.shape[3], kv.shape[5]
    rows = kv.numel() // (2 * dim)
    if not chip.has_tma:
        return (
            "no TMA" + " on AMD" * (chip.vendor == "amd") + ", which NVIDIA's chips have from compute capability 9.0 on"
        )
    if block_size % tile:
        return f"a tile of {tile} keys is not a box: it spans several blocks of {block_size} tokens"
    if dim * kv.itemsize % BOX_ALIGN_BYTES or kv.data_ptr() % BOX_ALIGN_BYTES:
        return f"rows of {dim * kv.itemsize} bytes do not begin at multiples of {BOX_ALIGN_BYTES}"
    if max(tile, dim) > LONGEST:
        return f"a box of {tile} rows of {dim} numbers is longer than {LONGEST}"
    if rows >= MOST_ROWS:
        return f"{rows:,} rows are more than a coordinate of 32 bits counts"
    return ""
