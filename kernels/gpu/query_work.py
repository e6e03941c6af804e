"""The work of prefill attention: tiles of queries, and splits of the keys that small chunks see.

A chunk of a few rows has a handful of tiles, which would walk all keys of a long prefix while most of the chip idles.
So its keys are cut into splits of one length, and a reduction sums up their results in order. Whether and where a
chunk's keys are cut depends on its own rows, its prefix and the model's heads: never on what else is in the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.interface import to_device

LEAST_SPLIT_TOKENS, SPLIT_STEP_TOKENS = 512, 128
"""The least length of a split, and what lengths are multiples of: a multiple of every tile of keys."""
LEAST_KEYS = 2048
"""Of a chunk that is split: for fewer a second launch is not worth its while."""
FEW_PROGRAMS = 64
"""Of a chunk that is split, at most: half of a large chip's multiprocessors, each of which runs one or two."""
MOST_PROGRAMS = 256
"""That a chunk is split into: two for each multiprocessor."""
MOST_PARTIALS = 2**16
"""Partial results, one a row, head and split, that are in memory at once: twice what a chunk has with tiles of 128."""


class Tiling(NamedTuple):
    """A tile of queries has `tokens` rows, and a program for each of `programs` groups of the `heads`."""

    tokens: int
    programs: int
    heads: int


class Chunk(NamedTuple):
    """The rows of the plan's span of that number, and their `splits` of `length` keys from key `first` on."""

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
    """Chunks whose partial results are in memory together.

    items int32 [N, 6]: span, first row of a tile, first key, end of keys, place of that row's partial result, places of
    each row. rows int32 [R, 3] and splits int32 [R, 2], as `reduce_splits` takes spans of one row: row, 1, unused; how
    many splits, and the place of the first one's partial result.
    """

    items: Tensor
    rows: Tensor
    splits: Tensor


class QueryWork(NamedTuple):
    """tiles int32 [N, 2]: span, first row, of the chunks that are not split. `places`: partial results of a round."""

    tiles: Tensor
    rounds: tuple[SplitRows, ...]
    places: int


def split_keys(num_rows: int, start: int, window: int, tiling: Tiling) -> tuple[int, int, int]:
    """First key, length and number of the splits of `num_rows` rows behind `start` tokens; (0, 0, 0): not split."""
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
    """Of the spans (row, num_rows, start) of more than one row. One copy to the device; longest tiles come first."""
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
    """As many chunks at once as there is memory for, at least one."""
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
    """The fields of `SplitRows`, on the host. Places of a row lie one behind the other, and so do rows and chunks."""
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
    """For counts [n]: each index as often as its count says, and how many of that index came before."""
    index = torch.repeat_interleave(counts)
    return index, torch.arange(len(index)) - (counts.cumsum(0) - counts)[index]


def _moved(parts: list[Tensor], device: torch.device) -> list[Tensor]:
    """Tables of whole numbers as int32 on the device, by one copy."""
    return to_device([part.to(torch.int32).numpy() for part in parts], device)
