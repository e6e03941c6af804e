"""What follows attention in a layer: rows of hidden states in, rows of their change out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kernels import Experts, GatedLinear, Linear, LoraChange, Routing, add_gated, route


class FeedForward(Protocol):
    """One MLP, or several of which each row uses some."""

    def __call__(self, rows: Tensor, activation: str) -> Tensor:
        """[T, hidden] to [T, hidden]; `activation` as `kernels.gated` names it."""
        ...


@dataclass(frozen=True, slots=True)
class MLP:
    """A gated MLP: gate_up makes 2 * intermediate of hidden, gate first."""

    gate_up: GatedLinear
    down: Linear

    def __call__(
        self, rows: Tensor, activation: str, gate_up: LoraChange | None = None, down: LoraChange | None = None
    ) -> Tensor:
        """With what adapters change at either matrix."""
        return self.down(self.gate_up.activated(rows, activation, gate_up), change=down)


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """An MLP that every row uses, times the sigmoid of its gate, [hidden] to [1], where it has one."""

    mlp: MLP
    gate: Linear | None


@dataclass(frozen=True, slots=True)
class MixtureOfExperts:
    """Each row goes to the experts that `routing` chooses by the router's logits, and to the shared one if any."""

    router: Linear
    experts: Experts
    routing: Routing
    shared: SharedExpert | None = None

    def __call__(self, rows: Tensor, activation: str) -> Tensor:
        chosen, shares = route(self.router(rows, wide=True), self.routing)
        made = self.experts(rows, chosen, shares, activation)
        if self.shared is None:
            return made
        gates = None if self.shared.gate is None else self.shared.gate(rows, wide=True)
        return add_gated(made, self.shared.mlp(rows, activation), gates)
