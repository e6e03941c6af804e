"""Attention inputs of a step that all layers share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor


class QuerySpan(NamedTuple):
    """`num_rows` query rows of one sequence, from `row`, at positions `start` .. `start + num_rows - 1`.

    Each row sees the keys of positions 0 to its own, in the blocks of `block_table`, which may be longer than needed.
    """

    row: int
    num_rows: int
    start: int
    block_table: Sequence[int]

    @property
    def length(self) -> int:
        """Length of the sequence, in tokens, including this span."""
        return self.start + self.num_rows


class KVLayout(NamedTuple):
    """Dimensions of a KV cache tensor, except for the second to last (K, V).

    If `latent_dim` is not 0, the cache stores only keys, and the first `latent_dim` elements of a key are its value.
    """

    num_blocks: int
    num_layers: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    latent_dim: int = 0


class AttentionPlan:
    """Attention plan of a step. Opaque: only valid for the backend that created it."""


class StepPlan(Protocol):
    """Plan of a recorded decode step with one token per row. Created once and prepared at each run of the step.

    spans int32 [rows, 3] and block_tables int32 [rows, width], see `kernels.interface.seats.StepRows`, must be written
    before `prepare`. `num_places` is the capacity for partial results.
    """

    spans: Tensor
    block_tables: Tensor
    num_places: int

    @property
    def num_rows(self) -> int:
        """Number of leading rows that a prepared step runs, including padding if the device skips padding itself."""

    def takes(self, lengths: Iterable[int]) -> bool:
        """Return whether the partial results of sequences of these lengths fit."""

    def prepare(self) -> AttentionPlan:
        """Build the attention plan from the current contents of `spans`."""
