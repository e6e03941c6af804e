"""Log probabilities of sampled tokens and of prompt tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from common.engine.models import SequenceChunk
from common.wire import LOGPROB_FLOOR, MAX_TOP_LOGPROBS, TokenLogprobs
from kernels import to_device, to_host

LOGPROB_BYTES = 64 * 2**20
"""Memory for float32 logits of prompt logprobs per step, subject to these limits on tokens."""
LOGPROB_TOKENS = range(16, 1025)


def max_prompt_logprobs(vocab_size: int) -> int:
    """Return the maximum number of prompt logprobs per step. Each requires a row of float32 logits."""
    return min(max(LOGPROB_TOKENS.start, LOGPROB_BYTES // (4 * vocab_size)), LOGPROB_TOKENS.stop - 1)


@dataclass(frozen=True, slots=True)
class WantedLogprobs:
    """Alternatives wanted for a row: the `count` best tokens, or `others` instead."""

    count: int
    others: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class LaunchedLogprobs:
    """Logprobs of `rows` with the same wanted alternatives, being copied to the host.

    `found`, int32 [n, 2 + 2 * alternatives]: bits of the token's logprob, its rank, bits of the alternatives' logprobs,
    and their IDs.
    """

    rows: Sequence[int]
    counts: Sequence[int]
    by_id: bool
    found: Tensor

    def read(self) -> list[TokenLogprobs]:
        """Return the logprobs of `rows`, after the copy has completed."""
        whole = self.found.numpy()
        width = (whole.shape[1] - 2) // 2
        own, ranks = whole[:, 0].view(np.float32).tolist(), whole[:, 1].tolist()
        values, ids = whole[:, 2 : 2 + width].view(np.float32).tolist(), whole[:, 2 + width :].tolist()
        tops = [list(zip(*pair, strict=True)) for pair in zip(ids, values, strict=True)]
        if self.by_id:
            tops = [sorted(top, key=lambda item: (-item[1], item[0])) for top in tops]
        else:
            tops = [top[:count] for top, count in zip(tops, self.counts, strict=True)]
        return [TokenLogprobs(*each) for each in zip(own, map(tuple, tops), ranks, strict=True)]


def launch_logprobs(logits: Tensor, token_ids: Tensor, wanted: Mapping[int, WantedLogprobs]) -> list[LaunchedLogprobs]:
    """Launch logprobs for the `wanted` rows of `logits`, float32 [n, vocab_size], at `token_ids`, int64 [n].

    Includes alternatives: the `count` best tokens, best first, ties by lowest ID. NaN counts as LOGPROB_FLOOR. A row's
    result depends only on that row. The host does not wait, and rows are processed in groups of bounded memory.
    """
    groups: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for row, each in wanted.items():
        more = 0 if each.others or each.count <= MAX_TOP_LOGPROBS else each.count  # small counts share a group
        groups.setdefault((more, tuple(each.others)), []).append(row)
    most, launched = max_prompt_logprobs(logits.shape[1]), []
    for (_, others), all_rows in groups.items():
        for first in range(0, len(all_rows), most):
            rows = all_rows[first : first + most]
            counts = [wanted[row].count for row in rows]
            chosen, ids = logits, token_ids
            if len(rows) < len(logits):
                (index,) = to_device([np.array(rows, dtype=np.int64)], logits.device)
                chosen, ids = logits.index_select(0, index), token_ids.index_select(0, index)
            found = _found(chosen, ids, max(counts), others)
            launched.append(LaunchedLogprobs(rows, counts, bool(others), to_host(found)))
    return launched


def launch_token_logprobs(
    logits: Tensor, token_ids: Sequence[int], count: int, *, others: Sequence[int] = ()
) -> list[LaunchedLogprobs]:
    """Launch logprobs for all rows of `logits`, whose tokens are known on the host."""
    (ids,) = to_device([np.array(token_ids, dtype=np.int64)], logits.device)
    return launch_logprobs(logits, ids, dict.fromkeys(range(len(token_ids)), WantedLogprobs(count, others)))


def token_logprobs(
    logits: Tensor, token_ids: Sequence[int], count: int, *, others: Sequence[int] = ()
) -> list[TokenLogprobs]:
    """Return the logprobs of all rows of `logits`, after waiting for them."""
    launched = launch_token_logprobs(logits, token_ids, count, others=others)
    if logits.device.type == "cuda":
        torch.cuda.current_stream(logits.device).synchronize()
    return [found for each in launched for found in each.read()]


def _found(logits: Tensor, token_ids: Tensor, count: int, others: Sequence[int]) -> Tensor:
    """Compute `LaunchedLogprobs.found` with `count` alternatives, or with the valid tokens of `others`."""
    vocab = logits.shape[1]
    logprobs = torch.log_softmax(logits, dim=-1).nan_to_num_(nan=LOGPROB_FLOOR).clamp_(min=LOGPROB_FLOOR)
    all_ids = torch.arange(vocab, device=logits.device)
    which = token_ids.clamp(max=vocab - 1)[:, None]  # invalid IDs get an arbitrary value
    own = logprobs.gather(1, which)
    ahead = ((logprobs > own) | ((logprobs == own) & (all_ids < which))).sum(-1, keepdim=True)
    if others:
        known = sorted({token_id for token_id in others if 0 <= token_id < vocab})
        (ids,) = to_device([np.array(known, dtype=np.int64)], logits.device)
        ids = ids.expand(len(logits), -1)
    else:
        ids = _best(logprobs, all_ids, min(count, vocab))
    values = logprobs.gather(1, ids)
    return torch.cat((own.view(torch.int32), 1 + ahead.int(), values.view(torch.int32), ids.int()), dim=1)


def _best(logprobs: Tensor, all_ids: Tensor, count: int) -> Tensor:
    """Return the IDs of the `count` best tokens of each row, ties by lowest ID: int64 [n, count].

    Logprobs are at most 0, so the bits of their magnitude followed by the ID sort correctly as integers.
    """
    if not count:
        return all_ids.new_empty(len(logprobs), 0)
    keys = (logprobs.view(torch.int32) & 0x7FFFFFFF).long().mul_(1 << 32).add_(all_ids)
    return torch.topk(keys, count, dim=-1, largest=False).values & 0xFFFFFFFF


def separate(logits: Tensor, chunks: Sequence[SequenceChunk]) -> tuple[Tensor, list[Tensor | None]]:
    """Split a step's logits, float32 [rows, vocab_size].

    Returns the rows to sample from, one per chunk with `sample`, and per chunk the rows after its tokens, or None
    without `all_logits`. Both are views, except that the first is a copy if a chunk has `all_logits`. The host does not
    wait.
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
    (index,) = to_device([np.array(sampled, dtype=np.int64)], logits.device)
    return logits.index_select(0, index), rows_of_chunks


def chunk_logprobs(logits: Tensor, token_ids: Sequence[int], start: int, count: int) -> tuple[TokenLogprobs, ...]:
    """Return logprobs of a prompt's tokens from `start + 1`.

    `logits`, float32 [n, vocab_size], are those after the tokens from `start`. There is one result fewer than
    rows if the last row follows the prompt's last token.
    """
    known = token_ids[start + 1 : start + 1 + logits.shape[0]]
    return tuple(token_logprobs(logits[: len(known)], known, count))


def launch_chunk_logprobs(
    logits: Tensor, token_ids: Sequence[int], start: int, count: int
) -> Sequence[LaunchedLogprobs]:
    """Launch `chunk_logprobs` without waiting."""
    known = token_ids[start + 1 : start + 1 + logits.shape[0]]
    return launch_token_logprobs(logits[: len(known)], known, count)
