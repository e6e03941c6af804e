"""AWQ, as written by AutoAWQ's GEMM version: int32 words of 4-bit integers across the outputs, in a special order.

`qweight` [in, out / 8], `qzeros` [groups, out / 8], `scales` [groups, out].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

import torch

from common.engine.weights.formats.format import SCALE_TYPES, CheckpointTensors, WeightFormat, expect
from common.engine.weights.formats.integers import PACKED, WORD_BITS, GroupedIntegers, bit_fields, stored_words
from common.engine.weights.formats.stored import StoredTensor
from common.errors import ModelError
from common.model_files import AWQ_BITS, WeightScheme

FIELD_OF_OUTPUT: Final = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True)
class AWQ(WeightFormat):
    """4-bit integers with zero points."""

    name = "awq"

    @classmethod
    def of(cls, scheme: WeightScheme) -> Self:
        return cls()

    def holds(self, tensors: CheckpointTensors, module: str) -> bool:
        return tensors.has(module + PACKED)

    def holds_integers(self, tensors: CheckpointTensors, module: str) -> bool:
        return True

    def check(self, tensors: CheckpointTensors, module: str) -> None:
        columns, words = expect(tensors, module + PACKED, ("I32",)).shape
        groups = expect(tensors, f"{module}.scales", SCALE_TYPES).shape[0]
        expect(tensors, f"{module}.qzeros", ("I32",), (groups, words))
        expect(tensors, f"{module}.scales", SCALE_TYPES, (groups, words * WORD_BITS // AWQ_BITS))
        if columns % groups:
            raise ModelError(f"{tensors.label}: {module}: {columns} inputs are not divisible into {groups} groups")

    def stored(self, tensors: CheckpointTensors, module: str) -> StoredTensor:
        return stored_words(tensors, module)

    def read(self, tensors: CheckpointTensors, module: str) -> GroupedIntegers:
        fields = bit_fields(tensors.tensor(module + PACKED), AWQ_BITS, FIELD_OF_OUTPUT)
        zeros = bit_fields(tensors.tensor(f"{module}.qzeros"), AWQ_BITS, FIELD_OF_OUTPUT)
        scale = tensors.tensor(f"{module}.scales").t().float().contiguous()
        numbers = fields.view(torch.int8).t().contiguous()
        return GroupedIntegers(AWQ_BITS, numbers, scale, zeros.t().float().contiguous())
