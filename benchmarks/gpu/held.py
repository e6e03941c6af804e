"""Cases of products with quantised weights: a layer's gate and up, beside cuBLAS with the same matrix in floats."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from benchmarks.gpu.attention import copies
from benchmarks.gpu.case import KernelCase, MakeCase
from benchmarks.gpu.gate import difference
from benchmarks.gpu.shape import GPUShape
from benchmarks.gpu.timer import Call
from kernels import QuantisedWeight
from kernels.interface.held_weight import HeldWeight

GROUP = 128
"""Of inputs, as AWQ, GPTQ and DeepSeek's fp8 have them."""


def held_cases(backend: Any, shape: GPUShape, device: torch.device) -> Iterator[MakeCase]:
    """Of one row, of a batch that reads the quantised weights, and of a prompt, for which they are widened."""
    for bits in (4, 8):
        for rows in (1, max(shape.decode_batches), max(shape.prefill_lengths)):
            yield partial(held_case, backend, shape, rows, bits, device)


def held_case(backend: Any, shape: GPUShape, rows: int, bits: int, device: torch.device) -> KernelCase:
    outputs, inputs = 2 * shape.intermediate, shape.hidden
    group = GROUP if inputs % GROUP == 0 else inputs
    weight = held(outputs, inputs, bits, group, device)
    count = copies(weight.num_bytes, shape.rotate_bytes)
    weights = [weight, *(held(outputs, inputs, bits, group, device) for _ in range(count - 1))]
    x = torch.randn(rows, inputs, device=device).to(shape.dtype)

    def check() -> str:
        expected = x.double() @ weight.dense(shape.dtype).double().T
        return difference(backend.held_linear(x, weight, None), expected, shape.dtype)

    def dense() -> list[Call]:
        floats = [each.dense(shape.dtype) for each in weights]
        return [lambda one=one: functional.linear(x, one) for one in floats]  # type: ignore[misc]

    calls: list[Call] = [lambda one=one: backend.held_linear(x, one, None) for one in weights]  # type: ignore[misc]
    num_bytes = weight.num_bytes + rows * (inputs + outputs) * shape.dtype.itemsize
    name = f"product in {'4 bits' if bits == 4 else 'fp8'}"
    size = f"{rows:,} rows, {outputs:,} x {inputs:,}"
    return KernelCase(name, size, num_bytes, 2 * rows * outputs * inputs, calls, check, {"cuBLAS, floats": dense})


def held(outputs: int, inputs: int, bits: int, group: int, device: torch.device) -> HeldWeight:
    """Random numbers: of 4 bits with zero points, or e4m3 ones."""
    scale = torch.rand(outputs, inputs // group, device=device) + 0.5
    if bits == 4:
        numbers = torch.randint(0, 16, (outputs, inputs), device=device, dtype=torch.int8)
        factors = (scale / 8 / inputs**0.5).half()
        return HeldWeight.of(QuantisedWeight(4, group, numbers, factors, -8 * factors))
    numbers = torch.randint(0, 127, (outputs, inputs), device=device, dtype=torch.uint8)
    return HeldWeight.of(QuantisedWeight(8, group, numbers, scale / 64 / inputs**0.5, None))
