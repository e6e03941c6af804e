"""AWQ, as written by AutoAWQ's GEMM version: int32 words of 4-bit integers across the outputs, in a special order.

`qweight` [in, out / 8], `qzeros` [groups, out / 8], `scales` [groups, out].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

import torch

from common.engine.weights.formats.format import SCALE_TYPES, CheckpointTensors, ConfigReader, WeightFormat, expect
from common.engine.weights.formats.integers import PACKED, WORD_BITS, GroupedIntegers, bit_fields, stored_words
from common.engine.weights.formats.stored import StoredTensor
from common.errors import ModelError

BITS: Final = 4
"""Bits per integer, the only value that AutoAWQ writes."""
FIELD_OF_OUTPUT: Final = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True)
class AWQ(WeightFormat):
    """4-bit integers with zero points."""

    name, methods = "awq", ("awq",)

    @classmethod
    def configured(cls, reader: ConfigReader) -> Self:
        reader.allow("bits" if "bits" in reader.fields else "w_bit", (BITS,))
        reader.allow("zero_point", (True,))
        reader.allow("version", (None, "gemm", "GEMM"))
        return cls()

    def holds(self, tensors: CheckpointTensors, module: str) -> bool:
        return tensors.has(module + PACKED)

    def holds_integers(self, tensors: CheckpointTensors, module: str) -> bool:
        return True

    def check(self, tensors: CheckpointTensors, module: str) -> None:
        columns, words = expect(tensors, module + PACKED, ("I32",)).shape
        groups = expect(tensors, f"{module}.scales", SCALE_TYPES).shape[0]
        expect(tensors, f"{module}.qzeros", ("I32",), (groups, words))
        expect(tensors, f"{module}.scales", SCALE_TYPES, (groups, words * WORD_BITS // BITS))
        if columns % groups:
            raise ModelError(f"{tensors.label}: {module}: {columns} inputs are not divisible into {groups} groups")

    def stored(self, tensors: CheckpointTensors, module: str) -> StoredTensor:
        return stored_words(tensors, module)

    def read(self, tensors: CheckpointTensors, module: str) -> GroupedIntegers:
        fields = bit_fields(tensors.tensor(module + PACKED), BITS, FIELD_OF_OUTPUT)
        zeros = bit_fields(tensors.tensor(f"{module}.qzeros"), BITS, FIELD_OF_OUTPUT)
        scale = tensors.tensor(f"{module}.scales").t().float().contiguous()
        numbers = fields.view(torch.int8).t().contiguous()
        return GroupedIntegers(BITS, numbers, scale, zeros.t().float().contiguous())
