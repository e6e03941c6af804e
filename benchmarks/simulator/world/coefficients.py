"""Coefficients of step times in files for simulations and plans; `/load` of a router reports the same."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from common.latency.step_model import Cost, StepModel


class StepCoefficients(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds, as in `StepModel`. `error` is there to be copied with the rest; no step's time depends on it."""

    fixed_s: Cost = 0.0
    floor_s: Cost = 0.0
    token_s: Cost = 0.0
    pair_s: Cost = 0.0
    row_s: Cost = 0.0
    context_s: Cost = 0.0
    error: Cost = 0.0
    num_steps: Annotated[int, Meta(ge=0)] = 0

    def model(self, error: float = 0.0, factor: float = 1.0) -> StepModel:
        """The model that a worker which has fitted it reports, for steps that take `factor` times as long."""
        return StepModel(
            fixed_s=factor * self.fixed_s,
            floor_s=factor * self.floor_s,
            token_s=factor * self.token_s,
            pair_s=factor * self.pair_s,
            row_s=factor * self.row_s,
            context_s=factor * self.context_s,
            error=error,
            num_steps=max(1, self.num_steps),
        )
