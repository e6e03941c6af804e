"""Quantised weights in a GPU's memory, which its kernels widen as they read them.

Numbers of 4 bits lie two in a byte. Scales lie by group first, so that neighbouring programs' columns read neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.interface.quantised import BLOCK, QuantisedWeight

NIBBLE = 4


@dataclass(frozen=True, slots=True)
class HeldWeight:
    """W [out, in] = scale * numbers + offset, group by group of inputs.

    numbers [out, in]: int8, or the bits of e4m3 numbers in uint8; `packed` uint8 [out, in / 2], an even input in the
    lower half. scale, and offset if there is one, [in / group, out]: float16 as files hold them, or float32.
    """

    numbers: Tensor
    scale: Tensor
    offset: Tensor | None
    group: int
    packed: bool
    float8: bool

    @classmethod
    def of(cls, weight: QuantisedWeight) -> HeldWeight:
        """The same numbers."""
        numbers = weight.numbers
        packed, float8 = weight.bits == NIBBLE, weight.float8
        if packed:
            low, high = numbers.view(torch.uint8)[:, 0::2], numbers.view(torch.uint8)[:, 1::2]
            numbers = low | (high << NIBBLE)
        scale = _by_group(weight.scale, weight.steps, weight.group)
        offset = weight.offset
        if offset is not None:
            steps = weight.steps if weight.offset_steps is None else weight.offset_steps
            offset = _by_group(offset, steps, weight.group)
        return cls(numbers.contiguous(), scale, offset, weight.group, packed, float8)

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.numbers.shape
        return rows, columns * 2 if self.packed else columns

    @property
    def num_bytes(self) -> int:
        parts = (self.numbers, self.scale, self.offset)
        return sum(part.nbytes for part in parts if part is not None)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """W in `dtype`, by plain torch: each number is widened to float32, and rounded once."""
        rows, columns = self.shape
        if self.packed:
            wide = torch.stack((self.numbers & 15, self.numbers >> NIBBLE), 2).view(rows, columns).float()
        else:
            wide = (self.numbers.view(torch.float8_e4m3fn) if self.float8 else self.numbers).float()
        parts = wide.view(rows, -1, self.group) * self.scale.float().T.unsqueeze(-1)
        if self.offset is not None:
            parts += self.offset.float().T.unsqueeze(-1)
        return parts.view(rows, columns).to(dtype)


def _by_group(factors: Tensor, steps: Tensor | None, group: int) -> Tensor:
    """[in / group, out] of factors [out, in / group], or of those of whole blocks times the steps of groups."""
    if steps is not None:
        factors = factors.float().repeat_interleave(BLOCK // group, dim=1) * steps
    return factors.T.contiguous()
