"""Unpacks GGUF's block formats for kernels that multiply their integers. Does not load torch.

A simple block is 32 weights of a row: a float16 scale, a float16 minimum (Q4_1 and Q5_1), the fifth bits (Q5), and 32
integers. The first 16 4-bit integers are in the low halves of their bytes. A K block is 256 weights in groups of 32 or
16, whose scales are steps of a float16 factor (ggml-common.h, ggml-quants.c).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from gguf.constants import GGMLQuantizationType

GROUP: Final = 32
"""Default number of weights of a row that share a scale."""
Bytes = npt.NDArray[np.uint8]
Integers = npt.NDArray[np.int8]
Halves = npt.NDArray[np.float16]


@dataclass(frozen=True, slots=True)
class QuantisedBlocks:
    """Quantised matrix: weight = scale * number + offset.

    `numbers` are int8 [rows, columns], `scale` and `offset` float16 [rows, columns / group]. In K blocks, `scale` and
    `offset` are float16 [rows, columns / 256], multiplied by `steps` and `offset_steps` int8 [rows, columns / group].
    Without `offset_steps`, the offset is multiplied by `steps`.
    """

    bits: int
    numbers: Integers
    scale: Halves
    offset: Halves | None
    group: int = GROUP
    steps: Integers | None = None
    offset_steps: Integers | None = None


def unpack_blocks(raw: Bytes, kind: GGMLQuantizationType) -> QuantisedBlocks | None:
    """Unpack the rows of a tensor, uint8 [rows, bytes per row]. Returns None for other formats."""
    if kind not in UNPACKERS:
        return None
    size, unpack = UNPACKERS[kind]
    return unpack(raw.reshape(raw.shape[0], -1, size))


def _q8_0(blocks: Bytes) -> QuantisedBlocks:
    return QuantisedBlocks(8, _flat(blocks[..., 2:].view(np.int8)), _half(blocks[..., :2]), None)


def _q4_0(blocks: Bytes) -> QuantisedBlocks:
    scale = _half(blocks[..., :2])
    return QuantisedBlocks(4, _flat(_nibbles(blocks[..., 2:])), scale, scale * np.float16(-8))


def _q4_1(blocks: Bytes) -> QuantisedBlocks:
    return QuantisedBlocks(4, _flat(_nibbles(blocks[..., 4:])), _half(blocks[..., :2]), _half(blocks[..., 2:4]))


def _q5_0(blocks: Bytes) -> QuantisedBlocks:
    scale = _half(blocks[..., :2])
    return QuantisedBlocks(5, _fives(blocks[..., 2:]), scale, scale * np.float16(-16))


def _q5_1(blocks: Bytes) -> QuantisedBlocks:
    return QuantisedBlocks(5, _fives(blocks[..., 4:]), _half(blocks[..., :2]), _half(blocks[..., 2:4]))


def _q4_k(blocks: Bytes) -> QuantisedBlocks:
    numbers = _nibbles(blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32))
    return _with_minima(4, _flat(numbers), blocks)


def _q5_k(blocks: Bytes) -> QuantisedBlocks:
    low = _nibbles(blocks[..., 48:].reshape(*blocks.shape[:2], 4, 32)).reshape(*blocks.shape[:2], 8, 32)
    fifth = (blocks[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & 1  # bit g of group g
    return _with_minima(5, _flat(low | (fifth << 4).view(np.int8)), blocks)


def _with_minima(bits: int, numbers: Integers, blocks: Bytes) -> QuantisedBlocks:
    """Unpack Q4_K and Q5_K: 8 scales and 8 minima of 6 bits in 12 bytes, the last four of each split over two."""
    packed = blocks[..., 4:16].reshape(*blocks.shape[:2], 3, 4)
    first, second, last = packed[..., 0, :], packed[..., 1, :], packed[..., 2, :]
    scales = np.concatenate((first & 63, (last & 15) | (first >> 6 << 4)), axis=-1)
    minima = np.concatenate((second & 63, (last >> 4) | (second >> 6 << 4)), axis=-1)
    steps, offset_steps = _flat(scales.view(np.int8)), _flat(minima.view(np.int8))
    return QuantisedBlocks(bits, numbers, _half(blocks[..., :2]), -_half(blocks[..., 2:4]), GROUP, steps, offset_steps)


def _q6_k(blocks: Bytes) -> QuantisedBlocks:
    """Unpack halves of 128 weights: 64 bytes of nibbles and 32 of upper bits each, then 16 scales."""
    shape = blocks.shape[:2]
    low = _nibbles(blocks[..., :128].reshape(*shape, 2, 64)).view(np.uint8)  # [.., 2, 128]
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high = (blocks[..., 128:192].reshape(*shape, 2, 1, 32) >> shifts) & 3  # [.., 2, 4, 32]
    numbers = _flat((low | (high.reshape(*shape, 2, 128) << 4)).view(np.int8))
    scale, steps = _half(blocks[..., 208:210]), _flat(blocks[..., 192:208].view(np.int8))
    return QuantisedBlocks(6, numbers, scale, scale * np.float16(-32), 16, steps)


UNPACKERS: Final[dict[GGMLQuantizationType, tuple[int, Callable[[Bytes], QuantisedBlocks]]]] = {
    GGMLQuantizationType.Q8_0: (34, _q8_0),
    GGMLQuantizationType.Q4_0: (18, _q4_0),
    GGMLQuantizationType.Q4_1: (20, _q4_1),
    GGMLQuantizationType.Q5_0: (22, _q5_0),
    GGMLQuantizationType.Q5_1: (24, _q5_1),
    GGMLQuantizationType.Q4_K: (144, _q4_k),
    GGMLQuantizationType.Q5_K: (176, _q5_k),
    GGMLQuantizationType.Q6_K: (210, _q6_k),
}
"""Bytes of a block, and its unpacker of blocks [rows, blocks per row, bytes]."""

BITS: Final = {kind: int(kind.name[1]) for kind in UNPACKERS}
"""Bits of an integer: 4 for Q4_K."""


def unpack_mxfp4(raw: Bytes) -> tuple[Bytes, Bytes]:
    """Return e2m1 codes uint8 [rows, columns], and biased exponents (plus 127) uint8 [rows, columns / 32].

    A block is an exponent and 16 bytes, with the first 16 numbers in the low halves.
    """
    blocks = raw.reshape(raw.shape[0], -1, 17)
    codes = _flat(_nibbles(blocks[..., 1:])).view(np.uint8)
    return codes, np.ascontiguousarray(blocks[..., 0])


def _half(two_bytes: Bytes) -> Halves:
    return np.ascontiguousarray(two_bytes).view(np.float16)[..., 0].copy()


def _nibbles(packed: Bytes) -> Integers:
    """Unpack bytes [.., n] to numbers [.., 2 n], low halves first."""
    return np.concatenate((packed & 15, packed >> 4), axis=-1).view(np.int8)


def _fives(packed: Bytes) -> Integers:
    """Unpack four bytes of fifth bits, followed by 16 of nibbles."""
    fifth = np.unpackbits(packed[..., :4], axis=-1, bitorder="little")
    return _flat(_nibbles(packed[..., 4:]) | (fifth << 4).view(np.int8))


def _flat(blocks: npt.NDArray[Any]) -> Integers:
    return np.ascontiguousarray(blocks).reshape(blocks.shape[0], -1)
