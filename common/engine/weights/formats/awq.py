"""AWQ as AutoAWQ's GEMM version writes it: int32 words of 4 bits across the outputs, in an order of their own.

`qweight` [in, out / 8], `qzeros` [groups, out / 8], `scales` [groups, out].
"""

from __future__ import annotations

from typing import Final

import torch

from common.engine.weights.formats.bit_fields import WORD_BITS, bit_fields
from common.engine.weights.formats.grouped_integers import GroupedIntegers
from common.engine.weights.formats.tensors import PACKED, SCALE_TYPES, CheckpointTensors, expect
from common.errors import ModelError

BITS: Final = 4
"""Of each integer: AutoAWQ writes no others."""
FIELD_OF_OUTPUT: Final = (0, 4, 1, 5, 2, 6, 3, 7)


class AWQLayout:
    """Reads modules of one checkpoint."""

    def holds(self, tensors: CheckpointTensors, module: str) -> bool:
        return tensors.has(module + PACKED)

    def holds_integers(self, tensors: CheckpointTensors, module: str) -> bool:
        return True

    def check(self, tensors: CheckpointTensors, module: str) -> None:
        """ModelError where the heads of a module's tensors do not fit together."""
        columns, words = expect(tensors, module + PACKED, ("I32",)).shape
        groups = expect(tensors, f"{module}.scales", SCALE_TYPES).shape[0]
        expect(tensors, f"{module}.qzeros", ("I32",), (groups, words))
        expect(tensors, f"{module}.scales", SCALE_TYPES, (groups, words * WORD_BITS // BITS))
        if columns % groups:
            raise ModelError(f"{tensors.label}: {module} has {columns} inputs in {groups} groups, which are not whole")

    def read(self, tensors: CheckpointTensors, module: str) -> GroupedIntegers:
        fields = bit_fields(tensors.tensor(module + PACKED), BITS, FIELD_OF_OUTPUT)
        zeros = bit_fields(tensors.tensor(f"{module}.qzeros"), BITS, FIELD_OF_OUTPUT)
        scale = tensors.tensor(f"{module}.scales").t().float().contiguous()
        numbers = fields.view(torch.int8).t().contiguous()
        return GroupedIntegers(BITS, numbers, scale, zeros.t().float().contiguous())
