"""Matrices of small integers with a scale, and optionally a zero point, per group of inputs; unpacking of integers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from common.engine.weights.formats.format import CheckpointTensors
from common.engine.weights.formats.stored import KERNEL_GROUP, StoredForm, StoredTensor, bytes_of
from kernels import QuantisedWeight

PACKED: Final = ".qweight"
"""Suffix of packed weight tensors in AWQ and GPTQ."""
WORD_BITS: Final = 32
"""Bits per packed word, int32 in all tools."""
KERNEL_GROUPS: Final = (64, 32)
"""Inputs per scale in the kernels' formats, which quantise the inputs of a product in the same groups."""
HALF_ROUNDING: Final = 2.0**-10
"""Maximum relative error of a scale in float16. It is exceeded only by subnormal numbers."""


@dataclass(frozen=True, slots=True)
class GroupedIntegers:
    """W [out, in] = scale * (numbers - zero), per group.

    numbers: int8 [out, in], 0 .. 15 for 4 bits, -128 .. 127 for 8 bits. scale, zero: float32 [out, groups]; zero may be
    None. group_of: int64 [in], each input's group, if the inputs of a group are not adjacent (activation order).
    """

    bits: int
    numbers: Tensor
    scale: Tensor
    zero: Tensor | None = None
    group_of: Tensor | None = None

    def dense(self) -> Tensor:
        """Return W, float32 [out, in]."""
        if self.group_of is None:
            rows, columns = self.numbers.shape
            parts = self.numbers.view(rows, self.scale.shape[1], -1).float()
            shifted = parts if self.zero is None else parts.sub_(self.zero.unsqueeze(-1))
            return shifted.mul_(self.scale.unsqueeze(-1)).view(rows, columns)
        wide = self.numbers.float()
        shifted = wide if self.zero is None else wide.sub_(self.zero[:, self.group_of])
        return shifted.mul_(self.scale[:, self.group_of])

    def held(self) -> QuantisedWeight | None:
        """Return the matrix for quantised kernels; None if none of their formats can represent it.

        Larger groups are split into several with the same scale.
        """
        size = self.numbers.shape[1] // self.scale.shape[1]
        group = next((group for group in KERNEL_GROUPS if size % group == 0), 0)
        if self.group_of is not None or not group:
            return None
        zero = self.zero if self.zero is not None and bool(self.zero.any()) else None
        if self.bits == 8 and zero is not None:
            return None
        offset = None
        if self.bits == 4:
            offset = torch.zeros_like(self.scale) if zero is None else -self.scale * zero
        if not _fits_half(self.scale) or (offset is not None and not _fits_half(offset)):
            return None
        times = size // group
        return QuantisedWeight(
            self.bits,
            group,
            self.numbers,
            _repeated(self.scale, times),
            None if offset is None else _repeated(offset, times),
        )


def _repeated(values: Tensor, times: int) -> Tensor:
    return values.half().repeat_interleave(times, dim=1)


def _fits_half(values: Tensor) -> bool:
    return bool(((values.half().float() - values).abs() <= HALF_ROUNDING * values.abs()).all())


def bit_fields(words: Tensor, bits: int, order: Sequence[int] | None = None) -> Tensor:
    """Unpack int32 [rows, words] to uint8 [rows, words * 32 / bits], 0 .. 2^bits - 1.

    The i-th integer is field `order[i]` of a word, counted from its lowest bits; field i without `order`.
    """
    count = WORD_BITS // bits
    shifts = torch.tensor(order or range(count), dtype=torch.int32) * bits
    fields = (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return fields.to(torch.uint8).view(words.shape[0], -1)


def centred(fields: Tensor) -> Tensor:
    """Convert uint8 to int8 by subtracting 128."""
    return (fields ^ 128).view(torch.int8)


def stored_words(tensors: CheckpointTensors, module: str) -> StoredTensor:
    """Describe a module of AWQ or GPTQ, whose bits follow from the shape of its zero points."""
    head, outputs = tensors.head(module + PACKED), tensors.head(f"{module}.scales").shape[1]
    bits = tensors.head(f"{module}.qzeros").shape[1] * WORD_BITS // outputs
    count = math.prod(head.shape) * WORD_BITS // bits
    return StoredTensor(f"{module}.weight", bytes_of(head), count, bits, StoredForm.INTEGERS, KERNEL_GROUP)
