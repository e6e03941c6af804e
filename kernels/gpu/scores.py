"""How attention scores become weights, as the kernels want it: base 2, with a quantised cache's scales folded in."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.gpu.tiles.chip import chip_of
from kernels.interface import AttentionRule

LOG2_E = math.log2(math.e)


class Scores(NamedTuple):
    """scale takes products q.k to base 2, or to twice the argument of tanh if softcap (base 2) > 0; window 0: none.

    sinks float32 [num_heads], natural base, or None. v_scale multiplies the values. fp8_bits: the cache is e4m3 and the
    chip cannot convert that.
    """

    scale: float
    softcap: float
    window: int
    sinks: Tensor | None
    v_scale: float
    fp8_bits: bool

    @classmethod
    def of(cls, kv: Tensor, rule: AttentionRule) -> Scores:
        scale = rule.scale * (rule.k_scale * LOG2_E)
        if rule.softcap:
            scale *= 2 / rule.softcap
        by_bits = kv.dtype == torch.float8_e4m3fn and not chip_of(kv.device).converts_e4m3
        return cls(scale, rule.softcap * LOG2_E, rule.window, rule.sinks, rule.v_scale, by_bits)

    def storage(self, kv: Tensor) -> Tensor:
        """The cache as the kernels read it."""
        return kv.view(torch.uint8) if self.fp8_bits else kv
