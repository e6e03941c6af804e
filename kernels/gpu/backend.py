"""The CUDA device's backend: Triton kernels. Implements `backends.Backend`."""

from __future__ import annotations

from kernels.gpu import held_products
from kernels.gpu.attention import paged_attention, plan_attention, step_plan
from kernels.gpu.blocks import block_sums, gather_blocks, scatter_blocks
from kernels.gpu.latents import write_latents
from kernels.gpu.norm import add_rms_norm, rms_norm
from kernels.gpu.rotary import rotate_and_write
from kernels.gpu.sampling import sample
from kernels.gpu.seats import fill_rows
from kernels.gpu.tiles.activation import gated
from kernels.interface import HeldProducts
from kernels.plain import add_gated, combine, route

packing: None = None
products: HeldProducts = held_products

__all__ = [
    "add_gated",
    "add_rms_norm",
    "block_sums",
    "combine",
    "fill_rows",
    "gated",
    "gather_blocks",
    "packing",
    "paged_attention",
    "plan_attention",
    "products",
    "rms_norm",
    "rotate_and_write",
    "route",
    "sample",
    "scatter_blocks",
    "step_plan",
    "write_latents",
]
