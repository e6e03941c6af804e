"""Weights as small integers with a scale for every group of inputs, and their quantisation from floats.

`quantise` rounds to nearest, a group at a time: int8 is symmetric, int4 spans a group's smallest to its largest weight,
as GGUF's Q4_1 does. Files that hold such groups keep theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

INT8_GROUP: Final = 64
INT4_GROUP: Final = 32
LEVELS: Final = {8: 127, 4: 15}


@dataclass(frozen=True, slots=True)
class QuantisedWeight:
    """W [out, in] = scale * numbers + offset, group by group.

    numbers int8 [out, in], -127 .. 127 for 8 bits and 0 .. 15 for 4; scale and, for 4 bits, offset float16
    [out, in / group].
    """

    bits: int
    group: int
    numbers: Tensor
    scale: Tensor
    offset: Tensor | None

    @property
    def shape(self) -> tuple[int, int]:
        return self.numbers.shape[0], self.numbers.shape[1]

    def dense(self, dtype: torch.dtype) -> Tensor:
        """W in `dtype`, [out, in]."""
        rows, columns = self.shape
        weight = self.numbers.view(rows, -1, self.group).float() * self.scale.float().unsqueeze(-1)
        if self.offset is not None:
            weight += self.offset.float().unsqueeze(-1)
        return weight.view(rows, columns).to(dtype)

    def rows(self, order: Tensor) -> QuantisedWeight:
        """The same with its rows in another order, int64 [out]."""
        offset = None if self.offset is None else self.offset[order]
        return QuantisedWeight(self.bits, self.group, self.numbers[order], self.scale[order], offset)

    def matches(self, other: QuantisedWeight) -> bool:
        """Whether both can be stacked."""
        return (self.bits, self.group, self.shape[1]) == (other.bits, other.group, other.shape[1])


def stack(parts: Sequence[QuantisedWeight]) -> QuantisedWeight:
    """One matrix of parts that match, one below the other."""
    first = parts[0]
    offsets = [part.offset for part in parts if part.offset is not None]
    return QuantisedWeight(
        first.bits,
        first.group,
        torch.cat([part.numbers for part in parts]),
        torch.cat([part.scale for part in parts]),
        torch.cat(offsets) if offsets else None,
    )


def quantise(weight: Tensor, bits: int) -> QuantisedWeight | None:
    """W [out, in] in 8 or 4 bits; None where its columns do not fall into whole groups."""
    group = INT4_GROUP if bits == 4 else INT8_GROUP if weight.shape[1] % INT8_GROUP == 0 else INT4_GROUP
    if weight.shape[1] % group:
        return None
    parts = weight.float().view(weight.shape[0], -1, group)
    offset: Tensor | None = None
    if bits == 8:
        scale = _half(parts.abs().amax(-1) / LEVELS[8])
        numbers = parts / _divisor(scale)
    else:
        low, high = parts.amin(-1), parts.amax(-1)
        scale, offset = _half((high - low) / LEVELS[4]), _half(low)
        numbers = (parts - offset.float().unsqueeze(-1)) / _divisor(scale)
    limits = (-LEVELS[8], LEVELS[8]) if bits == 8 else (0, LEVELS[4])
    rounded = numbers.round_().clamp_(*limits).to(torch.int8).view(weight.shape)
    return QuantisedWeight(bits, group, rounded, scale, offset)


def _half(values: Tensor) -> Tensor:
    return values.clamp(-65504.0, 65504.0).half()


def _divisor(scale: Tensor) -> Tensor:
    """A group of equal weights has scale 0, and any number."""
    wide = scale.float().unsqueeze(-1)
    return torch.where(wide == 0, torch.ones_like(wide), wide)
