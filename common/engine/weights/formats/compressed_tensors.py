"""compressed-tensors: matrices packed to int32 words, of int8, or of fp8.

    pack-quantized    weight_packed int32 [out, words of in], weight_shape [2], weight_scale [out, groups or 1 or none],
                      weight_zero_point packed down the outputs, or int8; weight_g_idx [in] with activation order
    int-quantized     weight int8 [out, in], weight_scale as above, weight_zero_point int8
    float-quantized   as `float8`

Integers are signed: packed integers and zero points are stored with an offset of 2^(bits - 1). Activation quantisation
in the checkpoint is ignored: the kernels quantise activations in their own groups, if they do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Self

import torch
from torch import Tensor

from common.engine.weights.formats.float8 import Float8, ScaledFloats
from common.engine.weights.formats.format import SCALE_TYPES, CheckpointTensors, WeightFormat, expect
from common.engine.weights.formats.gptq import activation_order
from common.engine.weights.formats.integers import WORD_BITS, GroupedIntegers, bit_fields, centred
from common.engine.weights.formats.stored import KERNEL_GROUP, StoredForm, StoredTensor, bytes_of
from common.errors import ModelError
from common.model_files import INTEGER_BITS, WeightScheme

PACKED, INT8 = "weight_packed", "I8"
ZERO_TYPES: Final = ("I32", "I8")


@dataclass(frozen=True)
class CompressedTensors(WeightFormat):
    """Determines each module's format by its tensors, because a checkpoint may mix formats. `block`: see `Float8`."""

    name = "compressed-tensors"
    block: tuple[int, int] | None = None

    @property
    def float8(self) -> Float8:
        return Float8(self.block)

    @classmethod
    def of(cls, scheme: WeightScheme) -> Self:
        return cls(scheme.block)

    def holds(self, tensors: CheckpointTensors, module: str) -> bool:
        if tensors.has(f"{module}.{PACKED}") or self.float8.holds(tensors, module):
            return True
        return tensors.has(f"{module}.weight") and tensors.head(f"{module}.weight").dtype == INT8

    def holds_integers(self, tensors: CheckpointTensors, module: str) -> bool:
        return not self.float8.holds(tensors, module)

    def check(self, tensors: CheckpointTensors, module: str) -> None:
        if self.float8.holds(tensors, module):
            return self.float8.check(tensors, module)
        if tensors.has(f"{module}.{PACKED}"):
            rows, columns, bits = self._packed(tensors, module)
        else:
            (rows, columns), bits = expect(tensors, f"{module}.weight", (INT8,)).shape, 8
        scale = expect(tensors, f"{module}.weight_scale", SCALE_TYPES)
        groups = scale.shape[1] if len(scale.shape) == 2 else 1
        expect(tensors, f"{module}.weight_scale", SCALE_TYPES, (rows, groups), (rows,), (1,), (1, 1), ())
        ordered = tensors.has(f"{module}.weight_g_idx")
        if ordered:
            expect(tensors, f"{module}.weight_g_idx", ("I32", "I64"), (columns,))
        if not ordered and columns % groups:
            raise ModelError(f"{tensors.label}: {module}: {columns} inputs are not divisible into {groups} groups")
        if tensors.has(f"{module}.weight_zero_point"):
            packed_rows = -(-rows * bits // WORD_BITS)
            if expect(tensors, f"{module}.weight_zero_point", ZERO_TYPES).dtype == "I32":
                expect(tensors, f"{module}.weight_zero_point", ZERO_TYPES, (packed_rows, groups))
        return None

    def stored(self, tensors: CheckpointTensors, module: str) -> StoredTensor:
        if self.float8.holds(tensors, module):
            return self.float8.stored(tensors, module)
        name = f"{module}.weight"
        if tensors.has(f"{module}.{PACKED}"):
            head = tensors.head(f"{module}.{PACKED}")
            rows, columns = tensors.tensor(f"{module}.weight_shape").tolist()
            bits = 8 if head.shape[1] * WORD_BITS >= columns * 8 else 4
            return StoredTensor(name, bytes_of(head), rows * columns, bits, StoredForm.INTEGERS, KERNEL_GROUP)
        head = tensors.head(name)
        return StoredTensor(name, bytes_of(head), math.prod(head.shape), 8, StoredForm.INTEGERS, KERNEL_GROUP)

    def read(self, tensors: CheckpointTensors, module: str) -> GroupedIntegers | ScaledFloats:
        if self.float8.holds(tensors, module):
            return self.float8.read(tensors, module)
        if tensors.has(f"{module}.{PACKED}"):
            rows, columns, bits = self._packed(tensors, module)
            fields = bit_fields(tensors.tensor(f"{module}.{PACKED}"), bits)[:, :columns].contiguous()
            numbers = centred(fields) if bits == 8 else fields.view(torch.int8)
        else:
            numbers, bits = tensors.tensor(f"{module}.weight"), 8
            rows, columns = numbers.shape
        scale = self._by_row(tensors.tensor(f"{module}.weight_scale").float(), rows)
        zero = self._zero(tensors, module, bits, rows, scale.shape[1])
        ordered = tensors.has(f"{module}.weight_g_idx")
        group_of = activation_order(tensors, f"{module}.weight_g_idx", columns, scale.shape[1]) if ordered else None
        return GroupedIntegers(bits, numbers, scale, zero, group_of)

    @staticmethod
    def _packed(tensors: CheckpointTensors, module: str) -> tuple[int, int, int]:
        """Return outputs, inputs and bits."""
        expect(tensors, f"{module}.weight_shape", ("I64", "I32"), (2,))
        rows, columns = tensors.tensor(f"{module}.weight_shape").tolist()
        found = expect(tensors, f"{module}.{PACKED}", ("I32",)).shape
        words = {bits: -(-columns * bits // WORD_BITS) for bits in INTEGER_BITS}
        for bits in INTEGER_BITS:
            if found == (rows, words[bits]):
                return rows, columns, bits
        raise ModelError(
            f"{tensors.label}: tensor {module}.{PACKED} is {list(found)}, but {rows} x {columns} weights require "
            f"{[rows, words[4]]} for 4 bits or {[rows, words[8]]} for 8 bits (no others are supported)"
        )

    def _zero(self, tensors: CheckpointTensors, module: str, bits: int, rows: int, groups: int) -> Tensor | None:
        """Return zero points in the units of `GroupedIntegers`, whose 4-bit numbers have an offset of 8."""
        base = 8.0 if bits == 4 else 0.0
        name = f"{module}.weight_zero_point"
        if not tensors.has(name):
            return torch.full((rows, groups), base) if base else None
        found = tensors.tensor(name)
        if found.dtype == torch.int32:
            fields = bit_fields(found.t().contiguous(), bits)[:, :rows].t()
            return (fields.float() - (0.0 if bits == 4 else 128.0)).contiguous()
        return self._by_row(found.float() + base, rows)

    @staticmethod
    def _by_row(values: Tensor, rows: int) -> Tensor:
        """Expand values per tensor, per row or per group to [rows, groups]."""
        if values.dim() < 2 or values.shape[0] == 1:
            values = values.reshape(-1, 1)
        return values.expand(rows, -1).contiguous()
