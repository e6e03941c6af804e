"""Embedding lookup. The head of a tied model may store the table in packed form."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kernels.backends import backend
from kernels.cpu.packed import PackedWeight
from kernels.cpu.recorder import ProgramRecorder
from kernels.cpu.shared_weights import shared
from kernels.linear import Linear


class Embedding:
    """A table [vocab, width] in the model's dtype."""

    def __init__(self, table: Tensor) -> None:
        self.dtype, self.device = table.dtype, table.device
        self._table: Tensor | PackedWeight = shared(table)
        self._packing = backend(table.device.type).packing

    @classmethod
    def tied(cls, table: Tensor, head: Linear) -> Embedding:
        """For a `head` that multiplies by `table`: uses the head's packed copy where that holds every bit."""
        if head.native is not None and not head.native.quantised and not head.native.gated:
            made = cls(table[:0])
            made._table = head.native
            return made
        return cls(table)

    @property
    def weight(self) -> Tensor:
        """The whole table; a copy when packed. For references, not for speed."""
        if isinstance(self._table, Tensor):
            return self._table
        return self(torch.arange(self._table.out_features))

    def __call__(self, token_ids: Tensor) -> Tensor:
        """int64 [T] to [T, width]."""
        if isinstance(self._table, Tensor):
            return functional.embedding(token_ids, self._table)
        assert self._packing is not None  # it packed the table
        return self._packing.unpack_rows(self._table, token_ids, self.dtype)

    def record(self, recorder: ProgramRecorder, scale: float) -> Tensor:
        """The rows of a step's token ids, times `scale`."""
        return recorder.embed(self._table, scale)
