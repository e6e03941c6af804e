"""fp8 (e4m3) matrices with one scale per tensor, per output, or per block of outputs and inputs.

DeepSeek's and Qwen's checkpoints name the scale of a block `weight_scale_inv`, although it is a multiplier. Others name
it `weight_scale`. Activation scales (`input_scale`) are ignored, because activations keep their dtype.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Self

import torch
from torch import Tensor

from common.engine.weights.formats.format import CheckpointTensors, WeightFormat, expect
from common.engine.weights.formats.stored import StoredForm, StoredTensor, bytes_of
from common.model_files import WeightScheme
from kernels import QuantisedWeight

WEIGHT_TYPE: Final = "F8_E4M3"
SCALE_TYPES: Final = ("F32", "BF16", "F16", "F8_E8M0")
SCALES: Final = ("weight_scale_inv", "weight_scale")


@dataclass(frozen=True, slots=True)
class ScaledFloats:
    """W [out, in] = scale * numbers. numbers: float8_e4m3fn [out, in]. scale: float32, in the file's shape."""

    numbers: Tensor
    scale: Tensor
    block: tuple[int, int] | None

    def dense(self) -> Tensor:
        """Return W, float32 [out, in]."""
        rows, columns = self.numbers.shape
        return self.numbers.float().mul_(spread(self.scale, rows, columns, self.block))

    def held(self) -> QuantisedWeight | None:
        """Return the matrix for GPU kernels; None if the last block of inputs is incomplete."""
        rows, columns = self.numbers.shape
        in_blocks = self.block is not None and tuple(self.scale.shape) == grid(rows, columns, self.block)
        group = self.block[1] if self.block is not None and in_blocks else columns
        if columns % group:
            return None
        scale = spread(self.scale, rows, columns, self.block).expand(rows, -1)[:, ::group].contiguous()
        return QuantisedWeight(8, group, self.numbers.view(torch.uint8), scale, None)


@dataclass(frozen=True)
class Float8(WeightFormat):
    """`block`: outputs and inputs that share a scale; None for one scale per output."""

    name = "fp8"
    block: tuple[int, int] | None = None

    @classmethod
    def of(cls, scheme: WeightScheme) -> Self:
        return cls(scheme.block)

    def holds(self, tensors: CheckpointTensors, module: str) -> bool:
        return tensors.has(f"{module}.weight") and tensors.head(f"{module}.weight").dtype == WEIGHT_TYPE

    def holds_integers(self, tensors: CheckpointTensors, module: str) -> bool:
        return False

    def check(self, tensors: CheckpointTensors, module: str) -> None:
        rows, columns = expect(tensors, f"{module}.weight", (WEIGHT_TYPE,)).shape
        shapes: list[tuple[int, ...]] = [(), (1,), (1, 1), (rows,), (rows, 1)]
        if self.block is not None:
            shapes.append(grid(rows, columns, self.block))
        expect(tensors, self._scale(tensors, module), SCALE_TYPES, *shapes, why=f"a matrix of {rows} x {columns}")

    def stored(self, tensors: CheckpointTensors, module: str) -> StoredTensor:
        name = f"{module}.weight"
        head = tensors.head(name)
        return StoredTensor(name, bytes_of(head), math.prod(head.shape), 8, StoredForm.SMALL_FLOATS)

    def read(self, tensors: CheckpointTensors, module: str) -> ScaledFloats:
        scale = tensors.tensor(self._scale(tensors, module)).float()
        return ScaledFloats(tensors.tensor(f"{module}.weight"), scale, self.block)

    @staticmethod
    def _scale(tensors: CheckpointTensors, module: str) -> str:
        return next((f"{module}.{name}" for name in SCALES if tensors.has(f"{module}.{name}")), f"{module}.{SCALES[1]}")


def spread(scale: Tensor, rows: int, columns: int, block: tuple[int, int] | None) -> Tensor:
    """Expand scales per tensor, row or block to [rows or 1, columns or 1]."""
    if scale.numel() == 1:
        return scale.reshape(1, 1)
    if block is None or tuple(scale.shape) != grid(rows, columns, block):
        return scale.reshape(rows, 1)
    return scale.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]


def grid(rows: int, columns: int, block: tuple[int, int]) -> tuple[int, int]:
    """Return the number of blocks down and across. The last ones may be incomplete."""
    return -(-rows // block[0]), -(-columns // block[1])
