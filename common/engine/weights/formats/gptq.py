"""GPTQ, as written by AutoGPTQ and GPTQModel: int32 words down the inputs, zero points across the outputs.

`qweight` [in * bits / 32, out], `qzeros` [groups, out * bits / 32], `scales` [groups, out], and with activation order
`g_idx` [in], the group of each input. The original layout stores zero points minus one, `gptq_v2` unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

from common.engine.weights.formats.format import SCALE_TYPES, CheckpointTensors, WeightFormat, expect
from common.engine.weights.formats.integers import (
    PACKED,
    WORD_BITS,
    GroupedIntegers,
    bit_fields,
    centred,
    stored_words,
)
from common.engine.weights.formats.stored import StoredTensor
from common.errors import ModelError
from common.model_files import INTEGER_BITS, WeightScheme


@dataclass(frozen=True)
class GPTQ(WeightFormat):
    """`zero_shift` is added to the stored zero points."""

    name = "gptq"
    zero_shift: int = 0

    @classmethod
    def of(cls, scheme: WeightScheme) -> Self:
        return cls(zero_shift=scheme.zero_shift)

    def holds(self, tensors: CheckpointTensors, module: str) -> bool:
        return tensors.has(module + PACKED)

    def holds_integers(self, tensors: CheckpointTensors, module: str) -> bool:
        return True

    def check(self, tensors: CheckpointTensors, module: str) -> None:
        self._bits(tensors, module)

    def stored(self, tensors: CheckpointTensors, module: str) -> StoredTensor:
        return stored_words(tensors, module)

    def read(self, tensors: CheckpointTensors, module: str) -> GroupedIntegers:
        bits, columns = self._bits(tensors, module)
        fields = bit_fields(tensors.tensor(f"{module}.qweight").t().contiguous(), bits)
        zeros = bit_fields(tensors.tensor(f"{module}.qzeros"), bits).t().float() + self.zero_shift
        if bits == 8:
            zeros -= 128
        scale = tensors.tensor(f"{module}.scales").t().float().contiguous()
        numbers = centred(fields) if bits == 8 else fields.view(torch.int8)
        group_of = self._group_of(tensors, module, columns, scale.shape[1])
        return GroupedIntegers(bits, numbers, scale, zeros.contiguous(), group_of)

    def _bits(self, tensors: CheckpointTensors, module: str) -> tuple[int, int]:
        """Return bits and inputs, derived from the tensors' shapes, because a checkpoint may mix bits."""
        words, outputs = expect(tensors, module + PACKED, ("I32",)).shape
        groups = expect(tensors, f"{module}.scales", SCALE_TYPES).shape[0]
        zeros = expect(tensors, f"{module}.qzeros", ("I32",)).shape
        bits = zeros[1] * WORD_BITS // outputs
        if bits not in INTEGER_BITS or outputs * bits % WORD_BITS:
            raise ModelError(
                f"{tensors.label}: {module}.qzeros {list(zeros)} has {bits} bits for each of {outputs} outputs: "
                "only 4 and 8 bits are supported"
            )
        columns = words * WORD_BITS // bits
        expect(tensors, f"{module}.qzeros", ("I32",), (groups, outputs * bits // WORD_BITS))
        expect(tensors, f"{module}.scales", SCALE_TYPES, (groups, outputs))
        if tensors.has(f"{module}.g_idx"):
            expect(tensors, f"{module}.g_idx", ("I32", "I64"), (columns,))
        elif columns % groups:
            raise ModelError(f"{tensors.label}: {module}: {columns} inputs are not divisible into {groups} groups")
        return bits, columns

    @staticmethod
    def _group_of(tensors: CheckpointTensors, module: str, columns: int, groups: int) -> torch.Tensor | None:
        """Return the group of each input; None if groups consist of adjacent inputs."""
        if not tensors.has(f"{module}.g_idx"):
            return None
        return activation_order(tensors, f"{module}.g_idx", columns, groups)


def activation_order(tensors: CheckpointTensors, name: str, columns: int, groups: int) -> torch.Tensor | None:
    """Return each input's group, int64 [columns]; None if groups are adjacent. Raises ModelError for invalid groups."""
    found = tensors.tensor(name).long()
    if int(found.min()) < 0 or int(found.max()) >= groups:
        raise ModelError(f"{tensors.label}: {name} has group {int(found.max())} of {groups}: download the model again")
    if columns % groups == 0 and torch.equal(found, torch.arange(columns) // (columns // groups)):
        return None
    return found
