"""Integers of a few bits that lie together in int32 words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

WORD_BITS: Final = 32
"""Of the int32 that every tool packs into."""


def bit_fields(words: Tensor, bits: int, order: Sequence[int] | None = None) -> Tensor:
    """int32 [rows, words] to uint8 [rows, words * 32 / bits], 0 .. 2^bits - 1.

    Field `order[i]` of a word, counted from its lowest bits, is the i-th integer; without an order field i is.
    """
    count = WORD_BITS // bits
    shifts = torch.tensor(order or range(count), dtype=torch.int32) * bits
    fields = (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return fields.to(torch.uint8).view(words.shape[0], -1)


def centred(fields: Tensor) -> Tensor:
    """uint8 as int8, 128 less."""
    return (fields ^ 128).view(torch.int8)
