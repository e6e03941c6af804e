"""Inputs of the sampling kernels. Loads only kernels, so that `make gpu` runs where nothing else is installed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels import Draw

if TYPE_CHECKING:
    from common.wire import SamplingParams


def draw_of(params: SamplingParams, position: int) -> Draw:
    """Return the sampling kernels' inputs for the token at `position`."""
    temperature = 0.0 if params.greedy else params.temperature
    return Draw(temperature, params.top_k, params.top_p, params.min_p, params.seed, position)
