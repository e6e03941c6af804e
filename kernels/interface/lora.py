"""Adapter matrices in the layout of the GPU kernels, and grouping of rows by adapter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class GroupedRows:
    """Rows sorted by adapter. `order` int32 [T] is the permutation; rows of adapter i end at `ends[i]`, int32.

    Rows without an adapter come last, after the end of every adapter. Computed on the device, so it can be part of a
    CUDA graph.
    """

    order: Tensor
    ends: Tensor

    @classmethod
    def of(cls, adapters: Tensor, max_loras: int) -> GroupedRows:
        """Group rows by `adapters`, int64 [T]; negative for rows without an adapter."""
        ranked, order = torch.where(adapters < 0, max_loras, adapters).sort(stable=True)
        numbers = torch.arange(max_loras, device=adapters.device)
        return cls(order.int(), torch.searchsorted(ranked, numbers, right=True, out_int32=True))


@dataclass(frozen=True, slots=True)
class LoraStack:
    """Matrices of all adapters for one weight matrix. Addresses never change, because CUDA graphs refer to them.

    a [max_loras, parts * max_rank, in] and b [max_loras, out, max_rank], padded with zeros.
    """

    a: Tensor
    b: Tensor
    parts: tuple[int, ...]
    max_rank: int

    @classmethod
    def empty(
        cls,
        in_features: int,
        parts: tuple[int, ...],
        max_loras: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> LoraStack:
        a = torch.zeros(max_loras, len(parts) * max_rank, in_features, dtype=dtype, device=device)
        b = torch.zeros(max_loras, sum(parts), max_rank, dtype=dtype, device=device)
        return cls(a, b, parts, max_rank)

    def set(self, place: int, parts: Sequence[tuple[int, Tensor, Tensor]]) -> None:
        """Write an adapter's parts (index, a [rank, in], b [out, rank]) to slot `place`.

        Work launched earlier on this thread's stream may still read the slot; other launched steps must not.
        """
        self.a[place].zero_()
        self.b[place].zero_()
        for number, a, b in parts:
            rank, first = a.shape[0], sum(self.parts[:number])
            self.a[place, number * self.max_rank : number * self.max_rank + rank] = a.to(self.a)
            self.b[place, first : first + self.parts[number], :rank] = b.to(self.b)
