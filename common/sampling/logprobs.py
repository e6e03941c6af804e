"""Log-probabilities: of tokens that were sampled, and of a prompt's own tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from common.model.batch import SequenceChunk
from common.wire.sampling_params import TokenLogprobs

LOGPROB_FLOOR = -9999.0
"""Stands for minus infinity and NaN, which JSON lacks."""
LOGPROB_BYTES = 64 * 2**20
"""Of float32 logits that one step of prompt logprobs may take, within these bounds on its tokens."""
LOGPROB_TOKENS = range(16, 1025)


def max_prompt_logprobs(vocab_size: int) -> int:
    """The most prompt tokens whose log-probabilities one step computes: each has a row of float32 logits."""
    return min(max(LOGPROB_TOKENS.start, LOGPROB_BYTES // (4 * vocab_size)), LOGPROB_TOKENS.stop - 1)


def token_logprobs(logits: Tensor, token_ids: Sequence[int], count: int) -> list[TokenLogprobs]:
    """Row by row of `logits`, float32 [n, vocab_size]: log-softmax at `token_ids[row]`, and the `count` best tokens.

    Ties go by lowest id. NaN counts as LOGPROB_FLOOR. A row's result depends on that row alone.
    """
    logprobs = torch.log_softmax(logits, dim=-1).nan_to_num_(nan=LOGPROB_FLOOR).clamp_(min=LOGPROB_FLOOR)
    own = logprobs.gather(1, torch.tensor(token_ids, dtype=torch.int64, device=logits.device)[:, None])[:, 0].tolist()
    if count == 0:
        return [TokenLogprobs(value) for value in own]
    count = min(count, logprobs.shape[1])
    values, indices = torch.topk(logprobs, min(count + 1, logprobs.shape[1]), dim=-1)
    best = [list(zip(*row, strict=True)) for row in zip(indices.tolist(), values.tolist(), strict=True)]
    for i, row in enumerate(best):
        if row[-1][1] == row[count - 1][1]:  # several tie for the last place: the lowest ids win
            index = torch.nonzero(logprobs[i] >= row[-1][1]).flatten()
            best[i] = list(zip(index.tolist(), logprobs[i][index].tolist(), strict=True))
    top = [tuple(sorted(row, key=lambda item: (-item[1], item[0]))[:count]) for row in best]
    return [TokenLogprobs(*pair) for pair in zip(own, top, strict=True)]


def separate(logits: Tensor, chunks: Sequence[SequenceChunk]) -> tuple[Tensor, list[Tensor | None]]:
    """Splits a step's logits, float32 [rows, vocab_size].

    Returns the rows to sample from, one for each chunk with `sample`, and for each chunk the rows that follow its
    tokens, or None without `all_logits`. Both are views; the first is a copy where some chunk has `all_logits`.
    """
    if not any(chunk.all_logits for chunk in chunks):
        return logits, [None] * len(chunks)
    sampled: list[int] = []
    rows_of_chunks: list[Tensor | None] = []
    end = 0
    for chunk in chunks:
        first, end = end, end + (len(chunk.token_ids) if chunk.all_logits else chunk.sample)
        rows_of_chunks.append(logits[first:end] if chunk.all_logits else None)
        if chunk.sample:
            sampled.append(end - 1)
    return logits[sampled], rows_of_chunks


def chunk_logprobs(logits: Tensor, token_ids: Sequence[int], start: int, count: int) -> tuple[TokenLogprobs, ...]:
    """Of a prompt's tokens from `start + 1` on; `logits` follow the tokens from `start` on, float32 [n, vocab_size].

    One fewer than rows where the last row follows the prompt's last token.
    """
    rows_of_chunks = token_ids[start + 1 : start + 1 + logits.shape[0]]
    return tuple(token_logprobs(logits[: len(rows_of_chunks)], rows_of_chunks, count))
