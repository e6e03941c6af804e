"""Batch-invariant products: a row's result is bitwise independent of the number of rows and its position among them.

A row's sum is one chain of tensor core instructions over consecutive inputs, or one chain for each split of the inputs,
added in order. The bounds of the chains depend only on the shape and type of W. With few rows, partial results of
splits are stored in memory. With many rows, these would be large, and tiles with more rows read weights less often, so
each program adds its splits itself. Both tiles use the same instruction and therefore the same chains;
`tests/kernels/gpu/test_invariant.py` verifies this in the compiled code.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.gpu.products.held_linear import MOST_ROWS, Tile, multiplied
from kernels.interface import HeldWeight

DENSE, DENSE_MANY = Tile(64, 128, 64, stages=3), Tile(128, 128, 64, warps=8, stages=3)
"""Tiles for 16-bit floats. Hopper's instruction takes 64 rows; smaller tiles would use a different one."""
FLOAT32 = Tile(32, 64, 32, stages=3)
"""Does not use tensor cores, which would truncate float32."""
HELD = Tile(64, 64, 64)
"""Tile for quantised weights with any number of rows. Widening the matrix first would change the order of inputs."""


def invariant_linear(x: Tensor, weight: Tensor | HeldWeight, bias: Tensor | None, *, wide: bool = False) -> Tensor:
    """As `HeldProducts.invariant_linear`."""
    many = x.shape[0] > MOST_ROWS
    return multiplied(
        x, weight, bias, tile_of(weight, x.dtype, many=many), torch.float32 if wide else x.dtype, whole=many
    )


def tile_of(weight: Tensor | HeldWeight, dtype: torch.dtype, *, many: bool) -> Tile:
    """The tile for inputs of this type, and for many rows or few."""
    if dtype == torch.float32:
        return FLOAT32
    if isinstance(weight, HeldWeight):
        return HELD
    return DENSE_MANY if many else DENSE
