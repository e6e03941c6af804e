"""MXFP4 as gpt-oss holds its experts: 4-bit floats (e2m1) with a power of two for every 32 inputs.

`NAME_blocks` uint8 [.., out, in / 32, 16], the first weight in a byte's low half; `NAME_scales` uint8 [.., out,
in / 32], the exponent plus 127 (OCP Microscaling Formats, version 1.0).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from common.weight_formats.tensors import CheckpointTensors, expect
from kernels import QuantisedWeight
from kernels.interface.quantised import E2M1

GROUP: Final = 32
EXPONENT_BIAS: Final = 127


@dataclass(frozen=True, slots=True)
class MicroscaledFloats:
    """W [.., out, in], as the file has it: blocks uint8 [.., out, in / 32, 16], scales uint8 [.., out, in / 32]."""

    blocks: Tensor
    scales: Tensor

    def dense(self) -> Tensor:
        """W float32."""
        values = torch.tensor(E2M1)[self._codes().int()].view(*self.scales.shape, GROUP)
        return (values * self._factors().unsqueeze(-1)).flatten(-2)

    def held(self) -> QuantisedWeight:
        """The same numbers for the kernels of a GPU: the matrices of a stack one below the other."""
        codes, factors = self._codes(), self._factors()
        scale = factors.to(torch.bfloat16)  # holds every power of two that a scale can be
        return QuantisedWeight(4, GROUP, codes.flatten(0, -2), scale.flatten(0, -2), None)

    def _codes(self) -> Tensor:
        """uint8 [.., out, in]."""
        return torch.stack((self.blocks & 15, self.blocks >> 4), dim=-1).flatten(-3)

    def _factors(self) -> Tensor:
        """float32 [.., out, in / 32]."""
        return torch.ldexp(torch.ones(self.scales.shape), self.scales.int() - EXPONENT_BIAS)


class MXFP4Layout:
    """Reads tensors of one checkpoint, stacks of experts' matrices: [experts, out, in]."""

    def holds(self, tensors: CheckpointTensors, module: str) -> bool:
        return tensors.has(f"{module}_blocks")

    def holds_integers(self, tensors: CheckpointTensors, module: str) -> bool:
        return False

    def check(self, tensors: CheckpointTensors, module: str) -> None:
        """ModelError where the heads of a tensor's parts do not fit together."""
        blocks = expect(tensors, f"{module}_blocks", ("U8",)).shape
        expect(tensors, f"{module}_blocks", ("U8",), (*blocks[:-1], GROUP // 2))
        expect(tensors, f"{module}_scales", ("U8",), blocks[:-1])

    def read(self, tensors: CheckpointTensors, module: str) -> MicroscaledFloats:
        return MicroscaledFloats(tensors.tensor(f"{module}_blocks"), tensors.tensor(f"{module}_scales"))
