"""Sampling parameters of logit rows, on the host and as device tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.interface.host_copies import bytes_to_device


class Draw(NamedTuple):
    """Sampling parameters of one row.

    `temperature` 0 selects the largest logit, and the lowest id among equals. `position` is the number of tokens before
    the new one; the noise depends only on (seed, position). `top_k` 0 and `top_p` 1 disable the filters.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    position: int = 0


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """Sampling parameters of n rows on the device, [n] each. `searches`: whether any row uses top_k or top_p.

    temperature, min_p float32; top_p float64; top_k int32; seed, position int64. Callers may modify the tensors in
    place between calls if `searches` remains correct.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    position: Tensor
    searches: bool

    @classmethod
    def pack(cls, draws: Sequence[Draw], device: torch.device) -> SamplingTensors:
        """Copy `draws` to the device. Raises ValueError for a negative temperature or a top_p of 0 or less."""
        for draw in draws:
            if draw.temperature < 0 or draw.top_p <= 0:
                raise ValueError(f"temperature {draw.temperature} and top_p {draw.top_p}: at least 0, and more than 0")
        count = len(draws)
        there = bytes_to_device(count * 36, lambda memory: _columns(memory, count, draws), device)
        wide, narrow = there[: 24 * count], there[24 * count :]
        seed, position, top_p = wide.view(torch.int64).view(3, count)
        temperature, min_p, top_k = narrow.view(torch.float32).view(3, count)
        searches = any(draw.top_k > 0 or draw.top_p < 1.0 for draw in draws)
        return cls(temperature, top_k.view(torch.int32), top_p.view(torch.float64), min_p, seed, position, searches)

    def __len__(self) -> int:
        return self.temperature.shape[0]

    def select(self, rows: Tensor) -> SamplingTensors:
        """Select rows, int64 [m]."""
        columns = (self.temperature, self.top_k, self.top_p, self.min_p, self.seed, self.position)
        temperature, top_k, top_p, min_p, seed, position = (column[rows] for column in columns)
        return SamplingTensors(temperature, top_k, top_p, min_p, seed, position, self.searches)


def _columns(memory: np.ndarray, count: int, draws: Sequence[Draw]) -> None:
    """Write `draws` to bytes [36 * count], so that a single copy transfers them to the device."""
    wide, narrow = memory[: 24 * count], memory[24 * count :]
    columns = list(zip(*draws, strict=True)) or [()] * len(Draw._fields)
    temperature, top_k, top_p, min_p, seed, position = columns
    wide.view(np.int64).reshape(3, count)[:2] = seed, position
    wide.view(np.float64).reshape(3, count)[2] = top_p
    narrow.view(np.float32).reshape(3, count)[:2] = temperature, min_p
    narrow.view(np.int32).reshape(3, count)[2] = [min(k, 2**31 - 1) for k in top_k]  # as good as any larger one
