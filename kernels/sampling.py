"""From logits to tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.backends import backend
from kernels.interface.draws import SamplingTensors


def sample(
    logits: Tensor | Sequence[Tensor], rows: SamplingTensors, allowed: Sequence[Tensor | None] | None = None
) -> Tensor:
    """Token ids int64 [n] of logits float32 [n, vocab], or of n rows [vocab]; on a GPU nothing waits for them.

    A row is divided by its temperature, then min_p, top_k and top_p drop tokens, in this order, by a threshold on
    probability: tokens of equal probability stay or go together. The token is the inverse of what is left of the
    cumulative distribution, in the order of ids, at the row's noise. A row depends on nothing but itself.

    `allowed`, one for each row, has the bits of 32 tokens in each int32 [ceil(vocab / 32)], on the host; None: every
    token may come. A row without one that may, or with a NaN among these, gets an id that is no token.
    """
    if not len(rows):
        return torch.empty(0, dtype=torch.int64, device=rows.seed.device)
    masks = allowed if allowed is not None else [None] * len(rows)
    return backend(logits[0].device.type).sample(logits, rows, masks)
