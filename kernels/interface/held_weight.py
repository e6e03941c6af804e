"""Quantised weights in GPU memory, which kernels widen when they read them.

4-bit numbers are packed two per byte. Scales are stored group-major, so that adjacent columns read adjacent scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.interface.quantised_weight import BLOCK, QuantisedWeight, as_floats

NIBBLE = 4
"""Bits."""


@dataclass(frozen=True, slots=True)
class HeldWeight:
    """W [out, in] = scale * numbers + offset, group by group of inputs; or a stack of such matrices, [count, out, in].

    numbers [.., out, in]: int8, or the bits of e4m3 numbers in uint8; `packed` uint8 [.., out, in / 2], an even input
    in the lower half: integers, or codes of `E2M1`. `floats`: they are e4m3 or e2m1 numbers. scale, and offset if there
    is one, [.., in / group, out]: float16 as files hold them, float32, or bfloat16.
    """

    numbers: Tensor
    scale: Tensor
    offset: Tensor | None
    group: int
    packed: bool
    floats: bool

    @classmethod
    def of(cls, weight: QuantisedWeight) -> HeldWeight:
        """Convert quantised weights without changing their values."""
        numbers = weight.numbers
        packed = weight.bits == NIBBLE
        if packed:
            low, high = numbers.view(torch.uint8)[:, 0::2], numbers.view(torch.uint8)[:, 1::2]
            numbers = low | (high << NIBBLE)
        scale = _by_group(weight.scale, weight.steps, weight.group)
        offset = weight.offset
        if offset is not None:
            steps = weight.steps if weight.offset_steps is None else weight.offset_steps
            offset = _by_group(offset, steps, weight.group)
        return cls(numbers.contiguous(), scale, offset, weight.group, packed, weight.floats)

    @classmethod
    def stacked(cls, weights: Sequence[QuantisedWeight]) -> HeldWeight:
        """Stack matrices of the same format."""
        parts = [cls.of(weight) for weight in weights]
        first, offsets = parts[0], [part.offset for part in parts if part.offset is not None]
        return cls(
            torch.stack([part.numbers for part in parts]),
            torch.stack([part.scale for part in parts]),
            torch.stack(offsets) if offsets else None,
            first.group,
            first.packed,
            first.floats,
        )

    def part(self, index: int) -> HeldWeight:
        """Return one matrix of a stack."""
        offset = None if self.offset is None else self.offset[index]
        return HeldWeight(self.numbers[index], self.scale[index], offset, self.group, self.packed, self.floats)

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in] of the matrix, or of each."""
        rows, columns = self.numbers.shape[-2:]
        return rows, columns * 2 if self.packed else columns

    @property
    def kind(self) -> str:
        """The numbers, in words."""
        if self.packed:
            return "4-bit floats" if self.floats else "4 bits"
        return "fp8" if self.floats else "8 bits"

    @property
    def num_bytes(self) -> int:
        parts = (self.numbers, self.scale, self.offset)
        return sum(part.nbytes for part in parts if part is not None)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """W of one matrix in `dtype`, by plain torch: each number is widened to float32, and rounded once."""
        rows, columns = self.shape
        numbers, bits = self.numbers, 8
        if self.packed:
            numbers, bits = torch.stack((numbers & 15, numbers >> NIBBLE), 2).view(rows, columns), NIBBLE
        wide = as_floats(numbers, bits, floats=self.floats)
        parts = wide.view(rows, -1, self.group) * self.scale.float().T.unsqueeze(-1)
        if self.offset is not None:
            parts += self.offset.float().T.unsqueeze(-1)
        return parts.view(rows, columns).to(dtype)


def _by_group(factors: Tensor, steps: Tensor | None, group: int) -> Tensor:
    """[in / group, out] of factors [out, in / group], or of those of whole blocks times the steps of groups."""
    if steps is not None:
        factors = factors.float().repeat_interleave(BLOCK // group, dim=1) * steps
    return factors.T.contiguous()
