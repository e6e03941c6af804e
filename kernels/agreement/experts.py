"""Compare experts with plain products, using a model's weights."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kernels.agreement.attention import name
from kernels.agreement.gate import Finding, finding
from kernels.agreement.products import by_rows
from kernels.experts import Expert, Experts
from kernels.interface import QuantisedWeight
from kernels.plain import backend as plain

EXPERT_ROWS = 5
"""Odd, so not a multiple of the rows per program."""
ROWS_TOGETHER = 80
"""Batch size for the check of batch invariance."""


def experts_check(
    experts: Experts, per_token: int, hidden_size: int, activation: str, device: torch.device, random: torch.Generator
) -> Finding:
    """Compare rows with different experts, including two rows with the same experts."""
    x = torch.randn(EXPERT_ROWS, hidden_size, generator=random).to(device=device, dtype=experts.dtype)
    order = torch.randperm(experts.count, generator=random)
    chosen = torch.stack([order.roll(i // 2 * per_token)[:per_token] for i in range(EXPERT_ROWS)])
    shares = torch.rand(EXPERT_ROWS, per_token, generator=random) + 0.1
    found = experts(x, chosen.to(device), shares.to(device), activation)
    expected = torch.zeros(EXPERT_ROWS, hidden_size, dtype=torch.float32, device=device)
    for row, (ids, parts) in enumerate(zip(chosen.tolist(), shares.tolist(), strict=True)):
        for index, part in zip(ids, parts, strict=True):
            expected[row] += part * _mlp(experts.expert(index), x[row : row + 1].float(), activation)[0]
    words = f"{per_token} of {experts.count} in {experts.kind}, {hidden_size} wide, {name(experts.dtype)}"
    compared = finding("experts", words, [("output", found, expected, experts.dtype)])
    if not experts.batch_invariant:
        return compared
    repeated = torch.arange(ROWS_TOGETHER) % EXPERT_ROWS
    inputs = (x[repeated.to(device)], chosen[repeated].to(device), shares[repeated].to(device))
    return by_rows(compared, partial(_multiplied, experts, activation), *inputs)


def _multiplied(experts: Experts, activation: str, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    return experts(x, chosen, shares, activation)


def _mlp(expert: Expert, x: Tensor, activation: str) -> Tensor:
    inner = plain.gated(_linear(x, expert.gate_up, expert.gate_up_bias), activation)
    return _linear(inner, expert.down, expert.down_bias)


def _linear(x: Tensor, weight: Tensor | QuantisedWeight, bias: Tensor | None) -> Tensor:
    dense = weight.float() if isinstance(weight, Tensor) else weight.dense(torch.float32)
    made = x @ dense.T
    return made if bias is None else made + bias.float()
