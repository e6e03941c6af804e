"""How scores become weights, as the kernels want it: base 2, with the scales of a quantised cache folded in."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

LOG2_E = math.log2(math.e)
CONVERTS_FP8 = (8, 9)  # the first compute capability with instructions for e4m3


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability; where tensors are the CPU's, that of the chip which the interpreter stands for."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


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
    def of(
        cls, kv: Tensor, scale: float, window: int, softcap: float, sinks: Tensor | None, k_scale: float, v_scale: float
    ) -> Scores:
        scale *= k_scale * LOG2_E
        if softcap:
            scale *= 2 / softcap
        old = kv.dtype == torch.float8_e4m3fn and capability(kv.device) < CONVERTS_FP8
        return cls(scale, softcap * LOG2_E, window, sinks, v_scale, old)

    def storage(self, kv: Tensor) -> Tensor:
        """The cache as kernels are to see it."""
        return kv.view(torch.uint8) if self.fp8_bits else kv
