"""Writes matrices in K-quants, rounded to nearest, which the package gguf reads but does not write."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf.constants import GGMLQuantizationType

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
BLOCK = 256


def quantised(weight: Array, kind: GGMLQuantizationType) -> Array:
    """A matrix in Q4_K or Q6_K, uint8 [rows, bytes a row]; in other types as the package writes it."""
    if kind not in PACKERS:
        return np.asarray(gguf.quants.quantize(weight, kind))
    return PACKERS[kind](weight.reshape(-1, BLOCK).astype(np.float32)).reshape(len(weight), -1)


def q4_k(values: Array) -> Bytes:
    """Values [blocks, 256]: two halves, scales and minima of 8 groups in 6 bits each, numbers of 4 bits."""
    groups = values.reshape(-1, 8, 32)
    lowest = np.maximum(-groups.min(-1), 0)
    factor, steps = _stepped((np.maximum(groups.max(-1), 0) + lowest) / 15, 63)
    low_factor, low_steps = _stepped(lowest, 63)
    scale, low = (factor * steps)[..., None], (low_factor * low_steps)[..., None]
    numbers = np.clip(np.round((groups + low) / scale), 0, 15).astype(np.uint8)
    pairs = numbers.reshape(-1, 4, 2, 32)
    first, last, low_first, low_last = steps[:, :4], steps[:, 4:], low_steps[:, :4], low_steps[:, 4:]
    parts = (
        *(one.astype(np.float16).view(np.uint8) for one in (factor, low_factor)),
        *(first | last >> 4 << 6, low_first | low_last >> 4 << 6, last & 15 | (low_last & 15) << 4),
        (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128),
    )
    return np.concatenate(parts, axis=1).astype(np.uint8)


def q6_k(values: Array) -> Bytes:
    """Values [blocks, 256]: numbers of 6 bits, low four and high two apart, 16 scales of 8 bits, a half."""
    groups = values.reshape(-1, 16, 16)
    factor, steps = _stepped(np.abs(groups).max(-1) / 31, 127)
    numbers = np.clip(np.round(groups / (factor * steps)[..., None]), -32, 31).astype(np.int64) + 32
    pairs, fours = numbers.reshape(-1, 2, 2, 64) & 15, numbers.reshape(-1, 2, 4, 32) >> 4
    parts = (
        (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128),
        sum(fours[:, :, i] << 2 * i for i in range(4)).reshape(-1, 64),
        steps,
        factor.astype(np.float16).view(np.uint8),
    )
    return np.concatenate(parts, axis=1).astype(np.uint8)


PACKERS = {GGMLQuantizationType.Q4_K: q4_k, GGMLQuantizationType.Q6_K: q6_k}


def _stepped(scale: Array, top: int) -> tuple[Array, Array]:
    """A factor that float16 holds [blocks, 1], and how often each group [blocks, groups] takes it, at least once."""
    factor = np.maximum((scale.max(-1, keepdims=True) / top).astype(np.float16), np.float16(1e-6)).astype(np.float32)
    return factor, np.clip(np.round(scale / factor), 1, top).astype(np.int64)
