"""What attention takes of a step: the same for all layers and backends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class QuerySpan(NamedTuple):
    """`num_rows` query rows from `row` on, of one sequence, at positions `start` .. `start + num_rows - 1`.

    The keys they may see are those of positions 0 .. their own, in the blocks of `block_table` (may be too long).
    """

    row: int
    num_rows: int
    start: int
    block_table: Sequence[int]

    @property
    def length(self) -> int:
        """Tokens of the sequence once this span is written."""
        return self.start + self.num_rows


class KVLayout(NamedTuple):
    """Sizes of a KV cache tensor, less its last-but-one dimension (K, V).

    `latent_dim`: the first so many numbers of a key are its value too, and the cache holds keys alone; 0: K and V.
    """

    num_blocks: int
    num_layers: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    latent_dim: int = 0


class AttentionPlan:
    """A backend makes it for itself; it is opaque to others."""
