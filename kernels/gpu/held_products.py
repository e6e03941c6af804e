"""Products of a CUDA device with weights in their stored form. Implements `interface.kernels.HeldProducts`."""

from __future__ import annotations

from kernels.gpu.products.experts import experts
from kernels.gpu.products.held_linear import held_linear
from kernels.gpu.products.invariant import invariant_linear
from kernels.gpu.products.lora import add_lora

__all__ = ["add_lora", "experts", "held_linear", "invariant_linear"]
