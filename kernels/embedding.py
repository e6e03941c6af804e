"""The rows of a table for token ids: of a plain one, or of the copy that the head of a tied model multiplies by."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kernels.linear import Linear
from kernels.native_backend import native_backend
from kernels.packed import PackedWeight
from kernels.program import Recorder


class Embedding:
    """A table [vocab, width] in the model's dtype."""

    def __init__(self, table: Tensor) -> None:
        self.dtype, self.device = table.dtype, table.device
        self._table: Tensor | PackedWeight = table

    @classmethod
    def tied(cls, table: Tensor, head: Linear) -> Embedding:
        """`head` multiplies by `table`: where it holds all of it in an order of its own, that copy serves both."""
        made = cls(table)
        if head.native is not None and not head.native.coded and not head.native.gated:
            made._table = head.native
        return made

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
        native = native_backend()
        assert native is not None  # it packed the table
        return native.unpack_rows(self._table, token_ids, self.dtype)

    def record(self, recorder: Recorder, scale: float) -> Tensor:
        """The rows of a step's token ids, times `scale`."""
        return recorder.embed(self._table, scale)
