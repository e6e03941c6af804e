"""The CUDA device's backend: Triton kernels. Implements `interface.kernels.DeviceKernels`."""

from __future__ import annotations

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

__all__ = [
    "add_lora",
    "add_rms_norm",
    "experts",
    "fill_rows",
    "gated",
    "gather_blocks",
    "held_linear",
    "invariant_linear",
    "paged_attention",
    "plan_attention",
    "rms_norm",
    "rotate_and_write",
    "sample",
    "scatter_blocks",
    "step_plan",
    "write_latents",
]
