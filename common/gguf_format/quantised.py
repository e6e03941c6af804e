"""Unpacks GGUF's simple block formats for kernels that multiply their integers as they are. No torch.

A block is 32 weights of a row: a float16 scale, in Q4_1 a float16 minimum, and 32 integers; 4-bit blocks hold the first
16 in the low halves of their bytes (ggml-common.h).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from gguf.constants import GGMLQuantizationType

GROUP: Final = 32


@dataclass(frozen=True, slots=True)
class QuantisedBlocks:
    """weight = scale * number + offset: numbers int8 [rows, columns], scale and offset float16 [rows, columns / 32]."""

    bits: int
    numbers: npt.NDArray[np.int8]
    scale: npt.NDArray[np.float16]
    offset: npt.NDArray[np.float16] | None


def unpack_blocks(raw: npt.NDArray[np.uint8], kind: GGMLQuantizationType) -> QuantisedBlocks | None:
    """Unpacks a tensor's rows, uint8 [rows, bytes a row]; None for other formats."""
    match kind:
        case GGMLQuantizationType.Q8_0:
            blocks = raw.reshape(raw.shape[0], -1, 34)
            return QuantisedBlocks(8, _flat(blocks[..., 2:].view(np.int8)), _half(blocks[..., :2]), None)
        case GGMLQuantizationType.Q4_0:
            blocks = raw.reshape(raw.shape[0], -1, 18)
            scale = _half(blocks[..., :2])
            return QuantisedBlocks(4, _nibbles(blocks[..., 2:]), scale, scale * np.float16(-8))
        case GGMLQuantizationType.Q4_1:
            blocks = raw.reshape(raw.shape[0], -1, 20)
            return QuantisedBlocks(4, _nibbles(blocks[..., 4:]), _half(blocks[..., :2]), _half(blocks[..., 2:4]))
    return None


def _half(two_bytes: npt.NDArray[np.uint8]) -> npt.NDArray[np.float16]:
    return np.ascontiguousarray(two_bytes).view(np.float16)[..., 0].copy()


def _nibbles(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.int8]:
    return _flat(np.concatenate((packed & 15, packed >> 4), axis=-1).view(np.int8))


def _flat(blocks: npt.NDArray[Any]) -> npt.NDArray[np.int8]:
    return np.ascontiguousarray(blocks).reshape(blocks.shape[0], -1)
