"""What the native kernels' attention takes of a step: spans, block tables, and the units that threads share out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kernels.interface import AttentionPlan, KVLayout, QuerySpan

WIDTH_MULTIPLE: Final = 16
"""Required multiple of head sizes and widths: the lanes of the widest vectors."""
MAX_HEAD_DIM: Final = 1024
"""Maximum head size of the native kernels."""
ROWS_PER_UNIT: Final = 96
"""Query rows (tokens x heads of a group) that share one pass over the keys."""
HEADS_PER_GROUP: Final = 8
"""Minimum heads per unit for latents. Small, so that threads can share a sequence, which has a single KV head."""


@dataclass(frozen=True, slots=True)
class NativePlan(AttentionPlan):
    """The arrays that `native/attention.h` reads.

    spans int64 [S, 4]: row, rows, start, first entry in tables; tables int32; units int32 [U, 4]: span, group of heads,
    first query, count; shape int64 [7]: layers, KV heads, block size, head_dim, heads, latent_dim, groups of heads.
    """

    spans: npt.NDArray[np.int64]
    tables: npt.NDArray[np.int32]
    units: npt.NDArray[np.int32]
    shape: npt.NDArray[np.int64]


def native_plan(spans: Sequence[QuerySpan], layout: KVLayout, num_heads: int) -> NativePlan:
    """The plan of a step, for sizes that `fits` takes."""
    groups = _num_groups(layout, num_heads)
    tokens = max(1, ROWS_PER_UNIT * groups // num_heads)
    table: list[int] = []
    rows = np.empty((len(spans), 4), dtype=np.int64)
    tiles: list[tuple[int, int, int, int]] = []  # work, span, first query, count
    for i, span in enumerate(spans):
        rows[i] = (span.row, span.num_rows, span.start, len(table))
        table.extend(span.block_table[: -(-span.length // layout.block_size)])
        for first in range(0, span.num_rows, tokens):
            count = min(tokens, span.num_rows - first)
            tiles.append((-(span.start + first + count) * count, i, first, count))
    tiles.sort()  # the longest first, so that threads end together
    units = np.empty((len(tiles), groups, 4), dtype=np.int32)
    part = np.array(tiles, dtype=np.int64)
    units[:, :, 0], units[:, :, 2], units[:, :, 3] = part[:, 1:2], part[:, 2:3], part[:, 3:4]
    units[:, :, 1] = np.arange(groups, dtype=np.int32)
    shape = np.array((*layout[1:5], num_heads, layout.latent_dim, groups), dtype=np.int64)
    return NativePlan(rows, np.array(table, dtype=np.int32), units.reshape(-1, 4), shape)


def _num_groups(layout: KVLayout, num_heads: int) -> int:
    """Query heads of a KV head share its units; those of latents, which are all of them, share several."""
    if not layout.latent_dim:
        return layout.num_kv_heads
    most = max(1, num_heads // HEADS_PER_GROUP)
    return next(groups for groups in range(most, 0, -1) if num_heads % groups == 0)


def fits(head_dim: int, latent_dim: int = 0) -> bool:
    """Whether the kernels take keys of that size, of which the first `latent_dim` numbers are values too."""
    return not head_dim % WIDTH_MULTIPLE and not latent_dim % WIDTH_MULTIPLE and head_dim <= MAX_HEAD_DIM
