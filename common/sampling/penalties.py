"""Logit bias, penalties and bans for the rows of a batch at once, and the token counts that penalties need.

A sequence keeps its counts and adds its new tokens to them, so a step does not count a long prompt again: it only reads
the distinct tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.wire.sampling_params import SamplingParams

BANNED = -1e30
"""Below every logit, and above what a grammar forbids."""


class GrowingTensor:
    """int64 numbers that grow at the end. They lie on the device that read them last."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.int64)
        self._size = 0

    def append(self, numbers: Sequence[int]) -> None:
        start, self._size = self._size, self._size + len(numbers)
        if self._size > len(self._memory):
            grown = self._memory.new_empty(2 * self._size)
            grown[:start] = self._memory[:start]
            self._memory = grown
        self._memory[start : self._size] = torch.tensor(numbers, dtype=torch.int64, device=self._memory.device)

    def write(self, places: Sequence[int], numbers: Sequence[int]) -> None:
        index, values = torch.tensor([places, numbers], device=self._memory.device)
        self._memory[index] = values

    def on(self, device: torch.device) -> Tensor:
        """A view of all numbers, valid until they change."""
        if self._memory.device != device:
            self._memory = self._memory.to(device)
        return self._memory[: self._size]


class TokenCounts:
    """The distinct tokens of a sequence, and how often each is in its output. It makes tensors on first use."""

    def __init__(self, prompt: Iterable[int] = (), output: Sequence[int] = ()) -> None:
        self._seen = set(prompt)
        self._new_seen = list(self._seen)
        self._counts: dict[int, int] = {}
        self._changed: set[int] = set()
        self._places: dict[int, int] = {}
        self._seen_ids, self._output_ids, self._output_counts = GrowingTensor(), GrowingTensor(), GrowingTensor()
        self.num_output_tokens = 0
        self.push(output)

    def push(self, output: Sequence[int]) -> None:
        """Adds new output tokens."""
        self.num_output_tokens += len(output)
        for token_id in output:
            if token_id not in self._seen:
                self._seen.add(token_id)
                self._new_seen.append(token_id)
            self._counts[token_id] = self._counts.get(token_id, 0) + 1
            self._changed.add(token_id)

    def seen(self, device: torch.device, draft: Sequence[int] = ()) -> Tensor:
        """The distinct tokens of the sequence and a draft: int64."""
        if self._new_seen:
            self._seen_ids.append(self._new_seen)
            self._new_seen = []
        ids = self._seen_ids.on(device)
        more = [token_id for token_id in dict.fromkeys(draft) if token_id not in self._seen]
        return torch.cat((ids, torch.tensor(more, device=device))) if more else ids

    def output(self, device: torch.device, draft: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        """The distinct tokens of the output and a draft, and how often each occurs: int64 both."""
        if self._changed:
            self._write_counts()
        ids, counts = self._output_ids.on(device), self._output_counts.on(device)
        if not draft:
            return ids, counts
        more = [token_id for token_id in dict.fromkeys(draft) if token_id not in self._places]
        places = {token_id: place for place, token_id in enumerate(more, len(self._places))}
        drafted = [places[token_id] if token_id in places else self._places[token_id] for token_id in draft]
        ids = torch.cat((ids, torch.tensor(more, dtype=torch.int64, device=device)))
        index = torch.tensor(drafted, device=device)
        counts = torch.cat((counts, counts.new_zeros(len(more)))).index_add_(0, index, torch.ones_like(index))
        return ids, counts

    def _write_counts(self) -> None:
        new = [token_id for token_id in self._changed if token_id not in self._places]
        self._places |= {token_id: place for place, token_id in enumerate(new, len(self._places))}
        self._output_ids.append(new)
        self._output_counts.append([0] * len(new))
        places = [self._places[token_id] for token_id in self._changed]
        self._output_counts.write(places, [self._counts[token_id] for token_id in self._changed])
        self._changed = set()


@dataclass(frozen=True, slots=True)
class Adjustment:
    """What adjusts one row: its parameters, its counted tokens, its draft tokens behind those, and its bans."""

    params: SamplingParams
    counts: TokenCounts
    draft: Sequence[int]
    banned: Sequence[int]


def needs_counts(params: SamplingParams) -> bool:
    """Whether a row's logits depend on the sequence's tokens."""
    return bool(params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty)


def adjust(logits: Tensor, rows: Sequence[Adjustment]) -> None:
    """Changes logits float32 [n, vocab], contiguous, in place: bias, then penalties, then bans."""
    flat, starts = logits.view(-1), range(0, logits.numel(), logits.shape[1])
    _bias(flat, rows, starts, logits.shape[1])
    _penalise_repetition(flat, rows, starts)
    _penalise_output(flat, rows, starts)
    vocab = logits.shape[1]
    banned = [start + i for row, start in zip(rows, starts, strict=True) for i in row.banned if 0 <= i < vocab]
    if banned:
        flat[torch.tensor(banned, device=flat.device)] = BANNED


def _bias(flat: Tensor, rows: Sequence[Adjustment], starts: Sequence[int], vocab: int) -> None:
    pairs = [
        (start + token_id, value)
        for row, start in zip(rows, starts, strict=True)
        for token_id, value in row.params.logit_bias
        if 0 <= token_id < vocab
    ]
    if pairs:
        index = torch.tensor([place for place, _ in pairs], device=flat.device)
        flat.index_add_(0, index, torch.tensor([value for _, value in pairs], device=flat.device))


def _penalise_repetition(flat: Tensor, rows: Sequence[Adjustment], starts: Sequence[int]) -> None:
    found = [
        (row.counts.seen(flat.device, row.draft) + start, row.params.repetition_penalty)
        for row, start in zip(rows, starts, strict=True)
        if row.params.repetition_penalty != 1.0
    ]
    if found:
        index = torch.cat([ids for ids, _ in found])
        penalty = _spread([penalty for _, penalty in found], [len(ids) for ids, _ in found], flat.device)
        value = flat[index]
        flat[index] = torch.where(value > 0, value / penalty, value * penalty)


def _penalise_output(flat: Tensor, rows: Sequence[Adjustment], starts: Sequence[int]) -> None:
    found = [
        (*row.counts.output(flat.device, row.draft), start, row.params)
        for row, start in zip(rows, starts, strict=True)
        if row.params.presence_penalty or row.params.frequency_penalty
    ]
    if found:
        index = torch.cat([ids + start for ids, _, start, _ in found])
        counts, sizes = torch.cat([counts for _, counts, _, _ in found]), [len(ids) for ids, _, _, _ in found]
        frequency = _spread([params.frequency_penalty for *_, params in found], sizes, flat.device)
        presence = _spread([params.presence_penalty for *_, params in found], sizes, flat.device)
        flat[index] -= frequency * counts + presence


def _spread(values: Sequence[float], sizes: Sequence[int], device: torch.device) -> Tensor:
    """float32 [sum(sizes)]: values[i] repeated sizes[i] times."""
    return torch.cat([torch.full((size,), value, device=device) for value, size in zip(values, sizes, strict=True)])
