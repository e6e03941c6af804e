"""Makes one vector of the hidden states of a prompt's tokens, over as many steps as the prompt takes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from common.wire import Pooling
from kernels import Linear, to_host
from prefill_worker.scheduler import PrefillChunk


class Pooler:
    """Pools by `pooling`; with `score`, float32 [labels, hidden_size], the vector is what this head makes of it."""

    def __init__(self, pooling: Pooling, score: Linear | None = None) -> None:
        self.pooling, self._score = pooling, score

    @torch.inference_mode()
    def launch(
        self, chunks: Sequence[PrefillChunk], last: Tensor, rows_of_chunks: Sequence[Tensor | None]
    ) -> Tensor | None:
        """The vectors of the n prompts that end with these chunks, [n, width], on their way to the host; else None.

        `last` are the hidden states [n, hidden_size] of the last tokens of these prompts, and `rows_of_chunks` those of
        all tokens of each chunk, for the mean.
        """
        ended = [chunk.sequence for chunk in chunks if chunk.sample]
        if self.pooling == "mean":
            for chunk, rows in zip(chunks, rows_of_chunks, strict=True):
                if rows is not None:
                    before, here = chunk.sequence.hidden_sum, rows.sum(0, dtype=torch.float64)
                    chunk.sequence.hidden_sum = here if before is None else before + here
            means = [s.hidden_sum / s.num_tokens for s in ended if s.hidden_sum is not None]
            last = torch.stack(means).float() if means else last
        if not ended:
            return None
        return to_host(last if self._score is None else self._score(last))


def packed(vectors: Tensor) -> list[bytes]:
    """Vectors that are on the host, as float32 in little-endian bytes; b"" for one that is not of finite numbers."""
    finite = torch.isfinite(vectors).all(1).tolist()
    rows = (row.astype("<f4").tobytes() for row in vectors.numpy())
    return [row if is_finite else b"" for row, is_finite in zip(rows, finite, strict=True)]
