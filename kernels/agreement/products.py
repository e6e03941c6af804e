"""Compare products with a model's matrices with plain torch, and check batch invariance where it is required."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.agreement.attention import name
from kernels.agreement.gate import Finding, finding
from kernels.head_linear import HeadLinear
from kernels.linear import Linear

ROWS = (1, 70, 260)
"""Row counts of a single sequence, a batch, and a prompt, which use different tiles or a widened matrix."""
COUNTS = (1, 2, 17, 64, 65)
"""Row counts whose results are compared with those of the whole batch."""
PIECE = 4096
"""Number of outputs whose weights are converted to float32 at a time."""


def product_check(linear: Linear, device: torch.device, random: torch.Generator) -> Finding:
    """Compare products with a quantised or batch-invariant matrix that uses the device kernels."""
    x = torch.randn(max(ROWS), linear.in_features, generator=random).to(device=device, dtype=linear.dtype)
    weight, bias = linear.weight, linear.bias
    expected = torch.cat([x.float() @ part.float().T for part in torch.split(weight, PIECE)], dim=1)
    if bias is not None:
        expected += bias.float()
    pairs = [(f"{rows} rows", linear(x[:rows]), expected[:rows], linear.dtype) for rows in ROWS]
    kind = "floats" if linear.held is None else f"{linear.held.kind}, groups of {linear.held.group}"
    words = f"{linear.out_features} x {linear.in_features} in {kind}, {name(linear.dtype)}"
    found = finding("product" if linear.held is None else "quantised product", words, pairs)
    return by_rows(found, linear, x) if linear.batch_invariant else found


def heads_check(linear: HeadLinear, device: torch.device, random: torch.Generator) -> Finding:
    """Compare per-head products, also for different row counts."""
    heads, inputs = linear.num_heads, linear.in_features
    x = torch.randn(max(ROWS), heads * inputs, generator=random).to(device=device, dtype=linear.dtype)
    expected = torch.einsum("rhi,hoi->rho", x.view(-1, heads, inputs).float(), linear.weight.float()).flatten(1)
    pairs = [(f"{rows} rows", linear(x[:rows]), expected[:rows], linear.dtype) for rows in ROWS]
    words = f"{heads} heads of {linear.out_features} x {inputs}, {name(linear.dtype)}"
    return by_rows(finding("product of heads", words, pairs), linear, x)


def by_rows(found: Finding, multiply: Callable[[Tensor], Tensor], *inputs: Tensor) -> Finding:
    """Extend a finding: report a problem if results for part of the rows differ bitwise from those for all rows."""
    if found.problem:
        return found
    together, rows = multiply(*inputs), len(inputs[0])
    for count in (one for one in COUNTS if one < rows):
        for first in (0, rows - count):
            apart = multiply(*(one[first : first + count].clone() for one in inputs))
            if different := int((apart != together[first : first + count]).any(1).sum()):
                words = f"{different} of {count} rows have other bits apart than from row {first} on among {rows}"
                return found._replace(problem=words)
    return found
