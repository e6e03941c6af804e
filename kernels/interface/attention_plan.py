"""What attention takes of a step: the same for all layers and backends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor


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


class StepPlan(Protocol):
    """Of a recorded step of rows of single tokens: made once, and laid out anew whenever the step runs.

    spans int32 [rows, 3] and block_tables int32 [rows, width], as `kernels.interface.seats.StepRows` has them, are
    written before `prepare`. `num_places` partial results have room.
    """

    spans: Tensor
    block_tables: Tensor
    num_places: int

    @property
    def num_rows(self) -> int:
        """How many rows the step runs once it is prepared: the first ones, with padding where the device does it."""

    def takes(self, lengths: Iterable[int]) -> bool:
        """Whether there is room for the partial results of rows whose sequences have these lengths."""

    def prepare(self) -> AttentionPlan:
        """What attention takes of the rows that are in `spans` when this runs."""
