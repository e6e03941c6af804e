"""Collective operations of ranks in a forward pass: sums, and logits over the whole vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from common.model_files.architecture import Shard
from kernels import Embedding


class Collectives(Protocol):
    """Collective operations. All ranks must call the same one at the same time."""

    def add_up(self, part: Tensor) -> Tensor:
        """Return the sum of all ranks' parts, in rank order. May write to `part`."""

    def join(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        """On rank 0, return all ranks' parts, [n, widths[rank]], concatenated; elsewhere, return `part`.

        When it returns on rank 0, all other ranks have computed theirs.
        """


class TensorParallel:
    """One rank's part of the vocabulary, and its collectives."""

    def __init__(self, shard: Shard, vocab_size: int, collectives: Collectives) -> None:
        self._ids, self._widths = shard.part(vocab_size), shard.widths(vocab_size)
        self._size, self._collectives = shard.size, collectives

    def embedded(self, embedding: Embedding, token_ids: Tensor) -> Tensor:
        """Embed int64 [T] to [T, width]. Each row comes from the rank that has the token."""
        own = token_ids - self._ids.start
        is_elsewhere = (own < 0) | (own >= len(self._ids))
        rows = embedding(own.masked_fill(is_elsewhere, 0))
        return self._collectives.add_up(rows.masked_fill(is_elsewhere[:, None], 0.0))

    def summed(self, part: Tensor) -> Tensor:
        return self._collectives.add_up(part) if part.numel() else part

    def normed(self, part: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Compute the RMS norm over all ranks' columns, of which `part` [T, n] and `weight` float32 [n] are one part.

        Squares are summed in float64, so that a row's norm does not depend on the other rows. If several ranks have the
        same columns, all columns have the same number of copies, which does not change the mean.
        """
        squares = self.summed(part.double().square().sum(1, keepdim=True))
        scale = (squares / (self._size * part.shape[1]) + eps).rsqrt().float()
        return (part.float() * scale * weight).to(part.dtype)

    def joined(self, logits: Tensor) -> Tensor:
        """Concatenate float32 [n, the rank's part of the vocabulary] to [n, vocab_size] on rank 0."""
        return self._collectives.join(logits, self._widths)


def padded(part: Tensor, width: int) -> Tensor:
    """Pad `part` with zeros to [n, width]."""
    return part if part.shape[1] == width else torch.nn.functional.pad(part, (0, width - part.shape[1]))
