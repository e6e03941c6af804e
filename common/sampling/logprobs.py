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


def token_logprobs(
    logits: Tensor, token_ids: Sequence[int], count: int, *, others: Sequence[int] = ()
) -> list[TokenLogprobs]:
    """Row by row of `logits`, float32 [n, vocab_size]: log-softmax at `token_ids[row]`, and the `count` best tokens.

    With `others` the alternatives are these tokens, best first, instead. Ties go by lowest id. NaN counts as
    LOGPROB_FLOOR. A row's result depends on that row alone.
    """
    logprobs = torch.log_softmax(logits, dim=-1).nan_to_num_(nan=LOGPROB_FLOOR).clamp_(min=LOGPROB_FLOOR)
    which = torch.tensor(token_ids, dtype=torch.int64, device=logits.device)[:, None]
    values = logprobs.gather(1, which)
    own, ranks = values[:, 0].tolist(), _ranks(logprobs, which, values)
    if others:
        top = _of_tokens(logprobs, others)
    elif count == 0:
        top = [()] * len(own)
    else:
        top = _best(logprobs, count)
    return [TokenLogprobs(*found) for found in zip(own, top, ranks, strict=True)]


def _ranks(logprobs: Tensor, which: Tensor, own: Tensor) -> list[int]:
    """The place of token `which` [n, 1], with log-probability `own` [n, 1], among all of its row; the best is 1."""
    ids = torch.arange(logprobs.shape[1], device=logprobs.device)
    ahead: list[int] = ((logprobs > own) | ((logprobs == own) & (ids < which))).sum(-1).tolist()
    return [1 + count for count in ahead]


def _of_tokens(logprobs: Tensor, token_ids: Sequence[int]) -> list[tuple[tuple[int, float], ...]]:
    known = sorted({token_id for token_id in token_ids if 0 <= token_id < logprobs.shape[1]})
    rows = logprobs[:, torch.tensor(known, dtype=torch.int64, device=logprobs.device)].tolist()
    return [tuple(sorted(zip(known, row, strict=True), key=lambda item: (-item[1], item[0]))) for row in rows]


def _best(logprobs: Tensor, count: int) -> list[tuple[tuple[int, float], ...]]:
    """The `count` best tokens of each row with their log-probabilities."""
    count = min(count, logprobs.shape[1])
    values, indices = torch.topk(logprobs, min(count + 1, logprobs.shape[1]), dim=-1)
    best = [list(zip(*row, strict=True)) for row in zip(indices.tolist(), values.tolist(), strict=True)]
    for i, row in enumerate(best):
        if row[-1][1] == row[count - 1][1]:  # several tie for the last place: the lowest ids win
            index = torch.nonzero(logprobs[i] >= row[-1][1]).flatten()
            best[i] = list(zip(index.tolist(), logprobs[i][index].tolist(), strict=True))
    return [tuple(sorted(row, key=lambda item: (-item[1], item[0]))[:count]) for row in best]


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
