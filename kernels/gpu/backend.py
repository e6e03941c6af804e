"""The CUDA device's backend: Triton kernels. Implements `backends.Backend`, and `HeldProducts` by itself."""

from __future__ import annotations

import sys
from typing import cast

from kernels.gpu.attention import paged_attention, plan_attention, step_plan
from kernels.gpu.blocks import gather_blocks, scatter_blocks
from kernels.gpu.latents import write_latents
from kernels.gpu.norm import add_rms_norm, rms_norm
from kernels.gpu.products.experts import experts
from kernels.gpu.products.held_linear import held_linear
from kernels.gpu.products.invariant import invariant_linear
from kernels.gpu.products.lora import add_lora
from kernels.gpu.rotary import rotate_and_write
from kernels.gpu.sampling import sample
from kernels.gpu.seats import fill_rows
from kernels.gpu.tiles.activation import gated
from kernels.interface.kernels import HeldProducts
from kernels.plain.experts import add_gated, combine, route

packing: None = None
products = cast(HeldProducts, sys.modules[__name__])

__all__ = [
    "add_gated",
    "add_lora",
    "add_rms_norm",
    "combine",
    "experts",
    "fill_rows",
    "gated",
    "gather_blocks",
    "held_linear",
    "invariant_linear",
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
