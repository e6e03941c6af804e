"""Token sampling."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.backends import backend
from kernels.interface.draws import SamplingTensors


def sample(
    logits: Tensor | Sequence[Tensor], rows: SamplingTensors, allowed: Sequence[Tensor | None] | None = None
) -> Tensor:
    """Sample token ids, int64 [n], from logits float32 [n, vocab] or n rows [vocab]. Asynchronous on a GPU.

    Logits are divided by the row's temperature. Then min_p, top_k and top_p filter tokens, in this order, with a
    threshold on probability, so tokens of equal probability are treated alike. The token is drawn by inverting the
    remaining cumulative distribution, in order of ids, at the row's noise. Rows are independent of each other.

    `allowed`, one for each row, has the bits of 32 tokens in each int32 [ceil(vocab / 32)], on the host; None: every
    token may come. A row without one that may, or with a NaN among these, gets an id that is no token.
    """
    if not len(rows):
        return torch.empty(0, dtype=torch.int64, device=rows.seed.device)
    masks = allowed if allowed is not None else [None] * len(rows)
    return backend(logits[0].device.type).sample(logits, rows, masks)
