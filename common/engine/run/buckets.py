"""Batch sizes of recorded decode steps: a step is padded to the next one."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

FINE_STEP, COARSE_STEP, FINE_UP_TO = 8, 64, 256
"""Rows. At 8 a padded step computes at most 7 rows for nothing; above 256 that of 64 is less than a quarter."""


def bucket_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """1, 2, 4, 8, 16, 24, 32, ... and `max_num_seqs` itself, rising: wider apart where a padded row costs little."""
    sizes = {1, 2, 4, *range(FINE_STEP, FINE_UP_TO + 1, FINE_STEP)}
    sizes |= set(range(FINE_UP_TO, max_num_seqs, COARSE_STEP))
    return (*sorted(size for size in sizes if size < max_num_seqs), max_num_seqs)


def bucket_for(sizes: Sequence[int], count: int) -> int | None:
    """The smallest of `sizes` (rising) that holds `count` rows, or None when none does or `count` is 0."""
    index = bisect_left(sizes, count)
    return sizes[index] if count > 0 and index < len(sizes) else None
