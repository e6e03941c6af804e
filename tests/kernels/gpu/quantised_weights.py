"""Random quantised matrices of every kind that stays quantised on a GPU."""

from __future__ import annotations

import torch

from kernels import QuantisedWeight, quantise
from kernels.interface.held_weight import HeldWeight

KINDS = ("int8", "int4", "Q4_K", "Q6_K", "fp8 by block", "fp8 by row", "mxfp4")


def weight_of(kind: str, outputs: int, inputs: int, seed: int = 3) -> QuantisedWeight:
    """Of groups of 64, 32, 32, 16, 64, of all inputs, or of 32."""
    generator = torch.Generator().manual_seed(seed)
    if kind in ("int8", "int4"):
        made = quantise(torch.randn(outputs, inputs, generator=generator) / inputs**0.5, int(kind[3:]))
        assert made is not None
        return made
    if kind == "mxfp4":
        numbers = torch.randint(0, 16, (outputs, inputs), generator=generator).to(torch.uint8)
        exponents = torch.randint(-7, -3, (outputs, inputs // 32), generator=generator)
        return QuantisedWeight(4, 32, numbers, torch.ldexp(torch.ones(exponents.shape), exponents).bfloat16(), None)
    if kind.startswith("fp8"):
        group = 64 if kind.endswith("block") else inputs
        numbers = torch.randint(0, 127, (outputs, inputs), generator=generator)  # but for NaN
        numbers += torch.randint(0, 2, (outputs, inputs), generator=generator) * 128
        scale = (torch.rand(outputs, inputs // group, generator=generator) + 0.5) / 448 / inputs**0.5
        return QuantisedWeight(8, group, numbers.to(torch.uint8), scale, None)
    bits, group = (4, 32) if kind == "Q4_K" else (6, 16)
    numbers = torch.randint(0, 2**bits, (outputs, inputs), generator=generator).to(torch.int8)
    scale = (torch.rand(outputs, inputs // 256, generator=generator) + 0.5).half() / 500
    steps = torch.randint(1, 60, (outputs, inputs // group), generator=generator).to(torch.int8)
    return QuantisedWeight(bits, group, numbers, scale / 30, -scale / 4, steps, steps.roll(1, 1))


def held_on(device: torch.device, weight: QuantisedWeight) -> HeldWeight:
    return HeldWeight.of(weight.map(lambda tensor: tensor.to(device)))
