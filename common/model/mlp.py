"""What follows attention in a layer: rows of hidden states in, rows of their change out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kernels import GatedLinear, Linear


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

    def __call__(self, rows: Tensor, activation: str) -> Tensor:
        return self.down(self.gate_up.activated(rows, activation))
