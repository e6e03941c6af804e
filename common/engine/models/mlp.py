"""Feed-forward part of a layer: rows of hidden states in, rows of changes out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kernels import Experts, GatedLinear, Linear, LoraChange, Routing, add_gated, route


class FeedForward(Protocol):
    """An MLP, or a mixture of experts."""

    def __call__(self, rows: Tensor, activation: str) -> Tensor:
        """Map [T, hidden] to [T, hidden]. See `kernels.gated` for the values of `activation`."""
        ...


@dataclass(frozen=True, slots=True)
class MLP:
    """Gated MLP: gate_up maps hidden to 2 * intermediate, gate first."""

    gate_up: GatedLinear
    down: Linear

    def __call__(
        self, rows: Tensor, activation: str, gate_up: LoraChange | None = None, down: LoraChange | None = None
    ) -> Tensor:
        """Apply the MLP with the adapters' changes at either matrix."""
        return self.down(self.gate_up.activated(rows, activation, gate_up), change=down)


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """MLP that every row uses, scaled by the sigmoid of its gate, [hidden] to [1], if there is one."""

    mlp: MLP
    gate: Linear | None


@dataclass(frozen=True, slots=True)
class MixtureOfExperts:
    """Each row uses the experts that `routing` selects from the router's logits, and the shared expert if any."""

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
