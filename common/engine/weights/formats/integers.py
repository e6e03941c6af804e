"""Matrices of small integers with a scale, and perhaps a zero point, for every group of inputs; and packed integers."""

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

BITS: Final = (4, 8)
"""Of the integers that GPTQ and compressed-tensors write, and the kernels read."""
PACKED: Final = ".qweight"
"""Ends the name of a tensor of words of AWQ and of GPTQ."""
WORD_BITS: Final = 32
"""Of the int32 that every tool packs into."""
KERNEL_GROUPS: Final = (64, 32)
"""Inputs that share a scale in the kernels' formats, which quantise the inputs of a product by the same groups."""
HALF_ROUNDING: Final = 2.0**-10
"""Relative error at most of a scale in the kernels' float16; larger only below float16's normal numbers."""


@dataclass(frozen=True, slots=True)
class GroupedIntegers:
    """W [out, in] = scale * (numbers - zero), group by group.

    numbers int8 [out, in]: 0 .. 15 of 4 bits, -128 .. 127 of 8; scale and zero float32 [out, groups], no zero: 0.
    `group_of` int64 [in] is each input's group where inputs of a group are not neighbours (activation order).
    """

    bits: int
    numbers: Tensor
    scale: Tensor
    zero: Tensor | None = None
    group_of: Tensor | None = None

    def dense(self) -> Tensor:
        """W float32 [out, in]."""
        if self.group_of is None:
            rows, columns = self.numbers.shape
            parts = self.numbers.view(rows, self.scale.shape[1], -1).float()
            shifted = parts if self.zero is None else parts.sub_(self.zero.unsqueeze(-1))
            return shifted.mul_(self.scale.unsqueeze(-1)).view(rows, columns)
        wide = self.numbers.float()
        shifted = wide if self.zero is None else wide.sub_(self.zero[:, self.group_of])
        return shifted.mul_(self.scale[:, self.group_of])

    def held(self) -> QuantisedWeight | None:
        """The same integers for the kernels; None where no format of theirs holds them.

        Larger groups become several with one scale.
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
    """int32 [rows, words] to uint8 [rows, words * 32 / bits], 0 .. 2^bits - 1.

    Field `order[i]` of a word, counted from its lowest bits, is the i-th integer; without an order field i is.
    """
    count = WORD_BITS // bits
    shifts = torch.tensor(order or range(count), dtype=torch.int32) * bits
    fields = (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return fields.to(torch.uint8).view(words.shape[0], -1)


def centred(fields: Tensor) -> Tensor:
    """uint8 as int8, 128 less."""
    return (fields ^ 128).view(torch.int8)


def stored_words(tensors: CheckpointTensors, module: str) -> StoredTensor:
    """A module of AWQ or GPTQ, whose bits follow from the shape of its zero points."""
    head, outputs = tensors.head(module + PACKED), tensors.head(f"{module}.scales").shape[1]
    bits = tensors.head(f"{module}.qzeros").shape[1] * WORD_BITS // outputs
    count = math.prod(head.shape) * WORD_BITS // bits
    return StoredTensor(f"{module}.weight", bytes_of(head), count, bits, StoredForm.INTEGERS, KERNEL_GROUP)
