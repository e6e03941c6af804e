"""Conversations out of a Mooncake trace: requests whose prompts go on from each other, as they arrived."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.load.trace import TraceRow

LEAST_SHARED = 3
"""So many leading blocks make two requests turns of one conversation: all share the first one or two."""


def conversations(
    rows: Sequence[TraceRow], *, number: int, least_turns: int, most_blocks: int, block_tokens: int
) -> list[TraceRow]:
    """The turns of the first `number` conversations that have `least_turns` or more of at most `most_blocks` blocks.

    Each block of the trace stands for `block_tokens` tokens, and prompts end with their last block.
    """
    short = [row for row in rows if 0 < len(row.block_ids) <= most_blocks]
    owners = _owners(short)
    num_turns = Counter(owners)
    kept = list(dict.fromkeys(owner for owner in owners if num_turns[owner] >= least_turns))[:number]
    chosen = [row for row, owner in zip(short, owners, strict=True) if owner in kept]
    return [replace(row, input_len=block_tokens * len(row.block_ids)) for row in chosen]


def num_distinct(rows: Sequence[TraceRow]) -> int:
    """How many different blocks the prompts have."""
    return len({block for row in rows for block in row.block_ids})


def shared_blocks(rows: Sequence[TraceRow]) -> list[int]:
    """Of each prompt, how many leading blocks an earlier one had."""
    seen: set[int] = set()
    found = []
    for row in rows:
        count = next((at for at, block in enumerate(row.block_ids) if block not in seen), len(row.block_ids))
        found.append(count)
        seen.update(row.block_ids)
    return found


def last_turns(rows: Sequence[TraceRow]) -> list[int]:
    """The place of each conversation's last prompt."""
    return sorted({owner: place for place, owner in enumerate(_owners(rows))}.values())


def _owners(rows: Sequence[TraceRow]) -> list[int]:
    """The conversation of each row, by its first row's place."""
    first: dict[int, int] = {}  # block -> the row that had it first
    owners: list[int] = []
    for place, (row, count) in enumerate(zip(rows, shared_blocks(rows), strict=True)):
        owners.append(owners[first[row.block_ids[count - 1]]] if count >= LEAST_SHARED else place)
        for block in row.block_ids:
            first.setdefault(block, place)
    return owners
