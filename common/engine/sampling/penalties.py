"""Logit bias, penalties and bans for all rows of a batch, and the token counts for penalties.

A sequence keeps its counts on the host and adds new tokens incrementally, so that a step reads only the distinct tokens
instead of recounting a long prompt. All changes of a step are copied to the device at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor, where

from common.grammar import BANNED
from common.wire import SamplingParams
from kernels import to_device

Ids = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.float32]


class GrowingArray:
    """Growable array of int64 numbers."""

    def __init__(self) -> None:
        self._memory = np.empty(0, dtype=np.int64)
        self._size = 0

    def append(self, numbers: Sequence[int]) -> None:
        start, self._size = self._size, self._size + len(numbers)
        if self._size > len(self._memory):
            grown = np.empty(2 * self._size, dtype=np.int64)
            grown[:start] = self._memory[:start]
            self._memory = grown
        self._memory[start : self._size] = numbers

    @property
    def all(self) -> Ids:
        """View of all numbers, valid until the next `append`."""
        return self._memory[: self._size]


class TokenCounts:
    """The distinct tokens of a sequence, and their number of occurrences in its output."""

    def __init__(self, prompt: Iterable[int] = (), output: Sequence[int] = ()) -> None:
        self._seen = set(prompt)
        self._places: dict[int, int] = {}
        self._seen_ids, self._output_ids, self._output_counts = GrowingArray(), GrowingArray(), GrowingArray()
        self._seen_ids.append(list(self._seen))
        self.num_output_tokens = 0
        self.push(output)

    def push(self, output: Sequence[int]) -> None:
        """Add new output tokens."""
        self.num_output_tokens += len(output)
        unseen = [token_id for token_id in dict.fromkeys(output) if token_id not in self._seen]
        self._seen.update(unseen)
        self._seen_ids.append(unseen)
        new = [token_id for token_id in dict.fromkeys(output) if token_id not in self._places]
        self._places |= {token_id: place for place, token_id in enumerate(new, len(self._places))}
        self._output_ids.append(new)
        self._output_counts.append([0] * len(new))
        counts = self._output_counts.all
        for token_id in output:
            counts[self._places[token_id]] += 1

    def seen(self, draft: Sequence[int] = ()) -> Ids:
        """Return the distinct tokens of the sequence and a draft."""
        ids = self._seen_ids.all
        more = [token_id for token_id in dict.fromkeys(draft) if token_id not in self._seen]
        return np.concatenate((ids, np.array(more, dtype=np.int64))) if more else ids

    def output(self, draft: Sequence[int] = ()) -> tuple[Ids, Ids]:
        """Return the distinct tokens of the output and a draft, and their numbers of occurrences."""
        ids, counts = self._output_ids.all, self._output_counts.all
        if not draft:
            return ids, counts
        more = [token_id for token_id in dict.fromkeys(draft) if token_id not in self._places]
        places = {token_id: place for place, token_id in enumerate(more, len(self._places))}
        ids = np.concatenate((ids, np.array(more, dtype=np.int64)))
        counts = np.concatenate((counts, np.zeros(len(more), dtype=np.int64)))
        for token_id in draft:
            counts[places[token_id] if token_id in places else self._places[token_id]] += 1
        return ids, counts


@dataclass(frozen=True, slots=True)
class Adjustment:
    """Inputs for the changes of one row: parameters, token counts, subsequent draft tokens, and bans."""

    params: SamplingParams
    counts: TokenCounts
    draft: Sequence[int]
    banned: Sequence[int]


def adjusts(params: SamplingParams) -> bool:
    """Return whether `params` change logits, apart from bans."""
    return bool(params.logit_bias or params.has_penalties)


@dataclass(frozen=True, slots=True)
class LogitChanges:
    """Changes of logits [n, vocab], as indices into the flattened tensor. Independent of the sequences' state.

    biased, bias       bias is added
    repeated, penalty  positive logits are divided by the penalty, others multiplied
    output, less       less is subtracted
    banned             set to BANNED
    """

    biased: Ids
    bias: Numbers
    repeated: Ids
    penalty: Numbers
    output: Ids
    less: Numbers
    banned: Ids

    @classmethod
    def of(cls, rows: Sequence[Adjustment], vocab: int) -> LogitChanges:
        """Compute the changes of n rows."""
        numbered = [(row * vocab, each) for row, each in enumerate(rows)]
        biased = [
            (start + token_id, value)
            for start, each in numbered
            for token_id, value in each.params.logit_bias
            if 0 <= token_id < vocab
        ]
        repeated = [
            (each.counts.seen(each.draft) + start, each.params.repetition_penalty)
            for start, each in numbered
            if each.params.repetition_penalty != 1.0
        ]
        output = [
            _output_changes(each, start)
            for start, each in numbered
            if each.params.presence_penalty or each.params.frequency_penalty
        ]
        banned = [start + token_id for start, each in numbered for token_id in each.banned if 0 <= token_id < vocab]
        return cls(
            np.array([place for place, _ in biased], dtype=np.int64),
            np.array([value for _, value in biased], dtype=np.float32),
            _joined([places for places, _ in repeated], np.int64),
            _joined([np.full(len(places), value, dtype=np.float32) for places, value in repeated], np.float32),
            _joined([places for places, _ in output], np.int64),
            _joined([less for _, less in output], np.float32),
            np.array(banned, dtype=np.int64),
        )

    def apply(self, logits: Tensor) -> None:
        """Apply the changes to logits float32 [n, vocab], contiguous, in place.

        Order: bias; repetition, then frequency and presence penalties; bans.
        """
        flat = logits.view(-1)
        arrays = (self.biased, self.bias, self.repeated, self.penalty, self.output, self.less, self.banned)
        biased, bias, repeated, penalty, output, less, banned = to_device(arrays, logits.device)
        if len(biased):
            flat.index_add_(0, biased, bias)
        if len(repeated):
            value = flat[repeated]
            flat[repeated] = where(value > 0, value / penalty, value * penalty)
        if len(output):
            flat[output] -= less
        if len(banned):
            flat.index_fill_(0, banned, BANNED)


def _output_changes(row: Adjustment, start: int) -> tuple[Ids, Numbers]:
    """Return the indices of the output's tokens in a row at offset `start`, and their penalties, in float32."""
    ids, counts = row.counts.output(row.draft)
    by_count = np.float32(row.params.frequency_penalty) * counts.astype(np.float32)
    return ids + start, by_count + np.float32(row.params.presence_penalty)


def _joined(arrays: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.empty(0, dtype=dtype)
