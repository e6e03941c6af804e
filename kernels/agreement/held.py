"""Products with quantised weights beside those with the floats that they stand for, of a model's own matrices."""

from __future__ import annotations

import torch

from kernels.agreement.attention import name
from kernels.agreement.gate import Finding, finding
from kernels.linear import Linear

ROWS = (1, 70, 260)
"""Of a lone sequence, of a batch, and of a prompt, for which the matrix is widened first."""


def held_check(linear: Linear, device: torch.device, random: torch.Generator) -> Finding:
    """A matrix that stays quantised in the memory of its device."""
    assert linear.held is not None
    outputs, inputs = linear.held.shape
    floats = linear.weight.float()
    pairs = []
    for rows in ROWS:
        x = torch.randn(rows, inputs, generator=random).to(device=device, dtype=linear.dtype)
        expected = x.float() @ floats.T
        if linear.bias is not None:
            expected += linear.bias.float()
        pairs.append((f"{rows} rows", linear(x), expected, linear.dtype))
    words = f"{outputs} x {inputs} in {linear.held.kind}, groups of {linear.held.group}, {name(linear.dtype)}"
    return finding("quantised product", words, pairs)
