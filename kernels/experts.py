"""Mixture of experts: routing, and products grouped by expert."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.backends import backend
from kernels.cpu.recorder import Slot
from kernels.interface.held_weight import HeldWeight
from kernels.interface.quantised_weight import QuantisedWeight
from kernels.interface.routing import Routing
from kernels.linear import GatedLinear, Linear, Weight


class Expert(NamedTuple):
    """The weights of one gated MLP: gate_up [2 * inner, hidden], gate first, and down [hidden, inner], with biases."""

    gate_up: Weight
    down: Weight
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None


def route(logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """Select the experts of each row of float32 logits [T, experts].

    Returns expert ids, int64, best first, and their shares (weights), float32. Both are [T, per_token].
    """
    return backend(logits.device.type).route(logits, routing)


def add_gated(x: Tensor, other: Tensor, gates: Tensor | None) -> Tensor:
    """Return x + other * sigmoid(gates), or x + other without gates. x, other [T, width]; gates float32 [T, 1]."""
    return backend(x.device.type).add_gated(x, other, gates)


class Experts:
    """out[t] = sum of shares[t, j] * expert chosen[t, j] of x[t].

    On a CPU, each expert's matrices are packed as in `Linear`, and results do not depend on the batch. On a GPU with
    kernels, weights stay quantised if all experts use the same format. `batch_invariant` as in `Linear`.
    """

    def __init__(self, experts: Sequence[Expert], *, dtype: torch.dtype, batch_invariant: bool = False) -> None:
        self.count, self.dtype, self.batch_invariant = len(experts), dtype, batch_invariant
        first = experts[0].gate_up
        place = first.device if isinstance(first, Tensor) else first.numbers.device
        self._products = backend(place.type).products
        if self._products is not None:
            self._gate_up = _stacked([expert.gate_up for expert in experts], dtype)
            self._down = _stacked([expert.down for expert in experts], dtype)
            self._gate_up_bias = _biases([expert.gate_up_bias for expert in experts])
            self._down_bias = _biases([expert.down_bias for expert in experts])
            return
        self.gate_up = [GatedLinear(expert.gate_up, expert.gate_up_bias, dtype=dtype) for expert in experts]
        self.down = [Linear(expert.down, expert.down_bias, dtype=dtype) for expert in experts]

    def __call__(self, x: Tensor, chosen: Tensor, shares: Tensor, activation: str) -> Tensor:
        """x [T, hidden], chosen int64 and shares float32 [T, k] to [T, hidden]; `activation`: see `kernels.gated`."""
        if isinstance(x, Slot):
            first, second = ([linear.native for linear in matrices] for matrices in (self.gate_up, self.down))
            return x.recorder.experts(x, chosen, shares, first, second, activation)
        if self._products is not None:
            weights = (self._gate_up, self._down, self._gate_up_bias, self._down_bias)
            return self._products.experts(x, chosen, shares, *weights, activation, self.batch_invariant)
        return self._by_expert(x, chosen, shares, activation)

    @property
    def by_device(self) -> bool:
        """Whether the device kernels perform the products."""
        return self._products is not None

    @property
    def kind(self) -> str:
        """Describe the format of the gate and up weights. Only available if `by_device`."""
        return self._gate_up.kind if isinstance(self._gate_up, HeldWeight) else "floats"

    def expert(self, index: int) -> Expert:
        """Return the weights of one expert in the model's dtype. Only available if `by_device`."""
        gate_up, down = (_one_of(stack, index, self.dtype) for stack in (self._gate_up, self._down))
        gate_up_bias, down_bias = (None if b is None else b[index] for b in (self._gate_up_bias, self._down_bias))
        return Expert(gate_up, down, gate_up_bias, down_bias)

    def _by_expert(self, x: Tensor, chosen: Tensor, shares: Tensor, activation: str) -> Tensor:
        per_token = chosen.shape[1]
        order = chosen.flatten().argsort(stable=True)  # pairs of row and expert, by expert
        counts = torch.bincount(chosen.flatten(), minlength=self.count).tolist()
        gathered, first = x[order // per_token], 0
        made = torch.empty((len(order), self.down[0].out_features), dtype=x.dtype, device=x.device)
        for gate_up, down, count in zip(self.gate_up, self.down, counts, strict=True):
            if count:
                rows = slice(first, first + count)
                made[rows] = down(gate_up.activated(gathered[rows], activation))
                first += count
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=order.device)
        return backend(made.device.type).combine(made, places.view_as(chosen), shares)


def _stacked(parts: Sequence[Weight], dtype: torch.dtype) -> Tensor | HeldWeight:
    """Stack the weights of all experts. The result is quantised if all use the same quantised format."""
    first = parts[0]
    if isinstance(first, QuantisedWeight):
        alike = [part for part in parts if isinstance(part, QuantisedWeight) and part.matches(first)]
        if len(alike) == len(parts):
            return HeldWeight.stacked(alike)
    found = [part if isinstance(part, Tensor) else part.dense(dtype) for part in parts]
    return torch.stack(found).contiguous()


def _biases(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Stack the biases of all experts; None without biases."""
    found = [part for part in parts if part is not None]
    return torch.stack(found).contiguous() if found else None


def _one_of(stack: Tensor | HeldWeight, index: int, dtype: torch.dtype) -> Tensor:
    return stack.part(index).dense(dtype) if isinstance(stack, HeldWeight) else stack[index]
