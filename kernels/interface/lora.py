"""Adapters' matrices as kernels of a GPU read them, and a step's rows in the order of their adapters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class GroupedRows:
    """`order` int32 [T] sorts rows by their adapter; those of adapter i end at `ends` [max_loras], int32.

    Rows without adapter come last, behind the end of every adapter. Made on the device, so that graphs may hold it.
    """

    order: Tensor
    ends: Tensor

    @classmethod
    def of(cls, adapters: Tensor, max_loras: int) -> GroupedRows:
        """Of rows' adapters, int64 [T], less than 0 for none."""
        ranked, order = torch.where(adapters < 0, max_loras, adapters).sort(stable=True)
        numbers = torch.arange(max_loras, device=adapters.device)
        return cls(order.int(), torch.searchsorted(ranked, numbers, right=True, out_int32=True))


@dataclass(frozen=True, slots=True)
class LoraStack:
    """All adapters' matrices of one site, in places that stay where they are: graphs hold their addresses.

    a [max_loras, parts * max_rank, in] and b [max_loras, out, max_rank], with zeros where an adapter has no more.
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
        """Put an adapter's (number of the part, a [rank, in], b [out, rank]) in a place that no launched step reads.

        Work of this thread's stream that was launched before may still read it.
        """
        self.a[place].zero_()
        self.b[place].zero_()
        for number, a, b in parts:
            rank, first = a.shape[0], sum(self.parts[:number])
            self.a[place, number * self.max_rank : number * self.max_rank + rank] = a.to(self.a)
            self.b[place, first : first + self.parts[number], :rank] = b.to(self.b)
