"""Products of which a row has the same bits in every batch: whatever the number of rows, and wherever it stands.

A row's sum is one chain of tensor core instructions, each over the next few inputs, or one chain for each split of the
inputs, added in order. Where chains begin and end depends on the shape and the type of W alone. Steps of few rows keep
the parts of splits in memory; of many rows that memory would be large, and tiles with more rows read a weight less
often: there a program adds up the splits itself. Both tiles take the same instruction, so both have the same chains:
`tests/kernels/gpu/test_invariant.py` reads that in what the compiler makes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.gpu.products.held_linear import MOST_ROWS, Tile, multiplied
from kernels.interface import HeldWeight

DENSE, DENSE_MANY = Tile(64, 128, 64, stages=3), Tile(128, 128, 64, warps=8, stages=3)
"""Of floats of 16 bits. 64 rows are those of Hopper's instruction, so fewer would take another one."""
FLOAT32 = Tile(32, 64, 32, stages=3)
"""Multiplied number by number: tensor cores would cut float32 off."""
HELD = Tile(64, 64, 64)
"""Of quantised weights, at any number of rows: to widen the matrix first would give its inputs another order."""


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
