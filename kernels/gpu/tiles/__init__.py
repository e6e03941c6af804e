"""What programs of several kernels do with a tile in registers: rounding, products, gates."""

from __future__ import annotations

from kernels.gpu.tiles.activation import gated
from kernels.gpu.tiles.chip import KIB, Chip, chip_of
from kernels.gpu.tiles.held_tile import add_dense_product, add_held_product, widened
from kernels.gpu.tiles.key_tile import product
from kernels.gpu.tiles.rounding import rounded

__all__ = [
    "Chip",
    "KIB",
    "add_dense_product",
    "add_held_product",
    "chip_of",
    "gated",
    "product",
    "rounded",
    "widened",
]
