"""MXFP4, the format of gpt-oss experts: 4-bit floats (e2m1) with a power-of-two scale per 32 inputs.

`NAME_blocks` uint8 [.., out, in / 32, 16], with the first weight in a byte's low half. `NAME_scales` uint8 [.., out,
in / 32], the exponent plus 127 (OCP Microscaling Formats, version 1.0).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

import torch
from torch import Tensor

from common.engine.weights.formats.format import CheckpointTensors, WeightFormat, expect
from common.engine.weights.formats.stored import StoredForm, StoredTensor, bytes_of
from common.model_files import WeightScheme
from kernels import QuantisedWeight

MXFP4_GROUP: Final = 32
"""Weights per exponent, as defined by OCP Microscaling Formats."""
EXPONENT_BIAS: Final = 127
"""Bias of the stored exponents."""


@dataclass(frozen=True, slots=True)
class MicroscaledFloats:
    """W [.., out, in] as stored: blocks uint8 [.., out, in / 32, 16], scales uint8 [.., out, in / 32]."""

    blocks: Tensor
    scales: Tensor

    def dense(self) -> Tensor:
        """Return W in float32."""
        return self.held().dense(torch.float32).view(*self.scales.shape[:-1], -1)

    def held(self) -> QuantisedWeight:
        """Return the matrix for GPU kernels. The matrices of a stack are stacked by rows."""
        codes = torch.stack((self.blocks & 15, self.blocks >> 4), dim=-1).flatten(-3)  # [.., out, in]
        return microscaled(codes.flatten(0, -2), self.scales.flatten(0, -2))


def microscaled(codes: Tensor, exponents: Tensor) -> QuantisedWeight:
    """Create W from codes, uint8 [out, in], one per byte, and biased exponents, uint8 [out, in / 32]."""
    scale = torch.ldexp(torch.ones(exponents.shape), exponents.int() - EXPONENT_BIAS)
    # bfloat16 represents all of these powers of two.
    return QuantisedWeight(4, MXFP4_GROUP, codes, scale.bfloat16(), None)


@dataclass(frozen=True)
class MXFP4(WeightFormat):
    """MXFP4. A "module" is a stack of experts' matrices, [experts, out, in], whose name has no suffix."""

    name = "mxfp4"

    @classmethod
    def of(cls, scheme: WeightScheme) -> Self:
        return cls()

    def module(self, name: str) -> str:
        return name.removesuffix("_blocks")

    def holds(self, tensors: CheckpointTensors, module: str) -> bool:
        return tensors.has(f"{module}_blocks")

    def holds_integers(self, tensors: CheckpointTensors, module: str) -> bool:
        return False

    def check(self, tensors: CheckpointTensors, module: str) -> None:
        blocks = expect(tensors, f"{module}_blocks", ("U8",)).shape
        expect(tensors, f"{module}_blocks", ("U8",), (*blocks[:-1], MXFP4_GROUP // 2))
        expect(tensors, f"{module}_scales", ("U8",), blocks[:-1])

    def stored(self, tensors: CheckpointTensors, module: str) -> StoredTensor:
        head = tensors.head(f"{module}_blocks")
        return StoredTensor(module, bytes_of(head), 2 * bytes_of(head), 4, StoredForm.SMALL_FLOATS)

    def read(self, tensors: CheckpointTensors, module: str) -> MicroscaledFloats:
        return MicroscaledFloats(tensors.tensor(f"{module}_blocks"), tensors.tensor(f"{module}_scales"))
