"""MXFP4 as gpt-oss holds its experts: 4-bit floats (e2m1) with a power of two for every 32 inputs.

`NAME_blocks` uint8 [.., out, in / 32, 16], the first weight in a byte's low half; `NAME_scales` uint8 [.., out,
in / 32], the exponent plus 127 (OCP Microscaling Formats, version 1.0).
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from common.weight_formats.tensors import CheckpointTensors, expect

VALUES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
GROUP: Final = 32
EXPONENT_BIAS: Final = 127


def decode_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """float32 [.., out, in] of blocks uint8 [.., out, in / 32, 16] and scales uint8 [.., out, in / 32]."""
    fields = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)  # [.., out, in / 32, 32]
    values = torch.tensor(VALUES)[fields.long()]
    return torch.ldexp(values, (scales.int() - EXPONENT_BIAS).unsqueeze(-1)).flatten(-2)


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

    def read(self, tensors: CheckpointTensors, module: str) -> Tensor:
        return decode_mxfp4(tensors.tensor(f"{module}_blocks"), tensors.tensor(f"{module}_scales"))
