"""Work lists of prefill attention: query tiles, and key splits for small chunks.

A small chunk has only a few tiles, each of which would iterate over all keys of a long prefix while most of the chip is
idle. Its keys are therefore divided into splits of equal length, and a reduction sums their results in order. The
splits of a chunk depend only on its rows, its prefix and the model's heads, not on the rest of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.interface import to_device

LEAST_SPLIT_TOKENS, SPLIT_STEP_TOKENS = 512, 128
"""Minimum length and granularity of a split. The granularity is a multiple of every key tile size."""
LEAST_KEYS = 2048
"""Minimum number of keys for splitting a chunk; below, the second launch costs more than it saves."""
FEW_PROGRAMS = 64
"""Chunks with more programs are not split: half the multiprocessors of a large chip, which run one or two each."""
MOST_PROGRAMS = 256
"""Maximum number of programs after splitting a chunk: two per multiprocessor."""
MOST_PARTIALS = 2**16
"""Maximum partial results in memory, one per row, head and split: twice those of a chunk with tiles of 128."""


class Tiling(NamedTuple):
    """Query tiling: `tokens` rows per tile, and one program for each of `programs` groups of the `heads`."""

    tokens: int
    programs: int
    heads: int


class Chunk(NamedTuple):
    """Rows of span number `span` of the plan, and their `splits` of `length` keys from key `first`."""

    span: int
    row: int
    num_rows: int
    first: int
    length: int
    splits: int

    @property
    def places(self) -> int:
        return self.num_rows * self.splits


class SplitRows(NamedTuple):
    """Chunks whose partial results are in memory at the same time.

    items int32 [N, 6]: span, first row of a tile, first key, end of keys, index of that row's partial result, partial
    results per row. rows int32 [R, 3] and splits int32 [R, 2] are the single-row spans for `reduce_splits`: row, 1,
    unused; number of splits, and index of the first partial result.
    """

    items: Tensor
    rows: Tensor
    splits: Tensor


class QueryWork(NamedTuple):
    """tiles int32 [N, 2]: (span, first row) of unsplit chunks. `places`: maximum partial results of a round."""

    tiles: Tensor
    rounds: tuple[SplitRows, ...]
    places: int


def split_keys(num_rows: int, start: int, window: int, tiling: Tiling) -> tuple[int, int, int]:
    """Return first key, length and number of the splits for `num_rows` rows from position `start`, or (0, 0, 0)."""
    programs = -(-num_rows // tiling.tokens) * tiling.programs
    begin, end = max(0, start + 1 - window) if window else 0, start + num_rows
    if programs > FEW_PROGRAMS or end - begin < LEAST_KEYS:
        return 0, 0, 0
    first = begin // SPLIT_STEP_TOKENS * SPLIT_STEP_TOKENS
    most = MOST_PROGRAMS // programs
    length = max(LEAST_SPLIT_TOKENS, -(-(end - first) // (most * SPLIT_STEP_TOKENS)) * SPLIT_STEP_TOKENS)
    return first, length, -(-(end - first) // length)


def query_work(
    spans: Sequence[tuple[int, int, int]], tiling: Tiling, window: int, device: torch.device, *, split: bool
) -> QueryWork:
    """Build the work of the spans (row, num_rows, start) with several rows. Longest tiles first; one device copy."""
    whole: list[tuple[int, int, int]] = []
    chunks: list[Chunk] = []
    for i, (row, count, start) in enumerate(spans):
        if count < 2:
            continue
        first, length, splits = split_keys(count, start, window, tiling) if split else (0, 0, 0)
        if splits:
            chunks.append(Chunk(i, row, count, first, length, splits))
        else:
            whole += [(-(start + min(at + tiling.tokens, count)), i, at) for at in range(0, count, tiling.tokens)]
    whole.sort()
    tiles = torch.tensor([tile[1:] for tile in whole], dtype=torch.int32).view(-1, 2)
    rounds = _rounds(chunks, tiling.heads)
    parts = [part for one in rounds for part in _split_rows(one, tiling)]
    moved = _moved([tiles, *parts], device)
    made = tuple(SplitRows(*moved[i : i + 3]) for i in range(1, len(moved), 3))
    return QueryWork(moved[0], made, max((sum(chunk.places for chunk in one) for one in rounds), default=0))


def _rounds(chunks: list[Chunk], heads: int) -> list[list[Chunk]]:
    """Group chunks into rounds that fit into memory. A round has at least one chunk."""
    rounds: list[list[Chunk]] = []
    room = 0
    for chunk in chunks:
        needed = chunk.places * heads
        if not rounds or needed > room:
            rounds.append([])
            room = MOST_PARTIALS
        rounds[-1].append(chunk)
        room -= needed
    return rounds


def _split_rows(chunks: list[Chunk], tiling: Tiling) -> tuple[Tensor, Tensor, Tensor]:
    """Return the fields of `SplitRows` on the host. Partial results are ordered by chunk, row and split."""
    table = torch.tensor(chunks)  # [chunks, fields of Chunk]
    span, first_row, num_rows, first, length, splits = table.unbind(1)
    places = num_rows * splits
    base = places.cumsum(0) - places
    of_item, at = _spread(-(-num_rows // tiling.tokens) * splits)
    token, split = at // splits[of_item] * tiling.tokens, at % splits[of_item]
    begin = first[of_item] + split * length[of_item]
    place = base[of_item] + token * splits[of_item] + split
    fields = (span[of_item], token, begin, begin + length[of_item], place, splits[of_item])
    items = torch.stack(fields, 1)[length[of_item].argsort(descending=True, stable=True)]
    of_row, at = _spread(num_rows)
    row = first_row[of_row] + at
    rows = torch.stack((row, torch.ones_like(row), torch.zeros_like(row)), 1)
    return items, rows, torch.stack((splits[of_row], base[of_row] + at * splits[of_row]), 1)


def _spread(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat each index counts[index] times. Also returns the ordinal of each repetition."""
    index = torch.repeat_interleave(counts)
    return index, torch.arange(len(index)) - (counts.cumsum(0) - counts)[index]


def _moved(parts: list[Tensor], device: torch.device) -> list[Tensor]:
    """Copy integer tables to the device as int32, in one copy."""
    return to_device([part.to(torch.int32).numpy() for part in parts], device)
