"""Blocks that a sequence needs when every layer of the model has a sliding window. Pure.

    table   [ HOLE HOLE | in the window ... | not yet written ]
              released    owned

The token at position p attends to the keys from p - window + 1 to p. Positions only grow, so a block that the next
token does not see is never needed again.
"""

from __future__ import annotations

from dataclasses import dataclass

HOLE = -1
"""Entry of a block table whose block was released or was never needed. Kernels never read it."""
SPARE_BLOCKS = 2
"""Blocks beyond those of one step: a step in flight writes one token ahead, and both ends of a span may cut a block."""


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """Cached blocks that a sequence starts from: its table from block `first` on. Earlier blocks are not needed."""

    first: int
    blocks: list[int]

    @property
    def end(self) -> int:
        """Number of leading blocks that are not computed."""
        return self.first + len(self.blocks)


@dataclass(frozen=True, slots=True)
class Window:
    """`num_tokens` is the widest window of all layers, or 0 if some layer has full attention and needs every block."""

    num_tokens: int
    block_size: int

    def __bool__(self) -> bool:
        return self.num_tokens > 0

    def first_block(self, position: int) -> int:
        """Index of the first block that the token at `position` and later tokens attend to."""
        return max(0, position + 1 - self.num_tokens) // self.block_size if self.num_tokens else 0

    def most_blocks(self, num_tokens: int, step_tokens: int = 1) -> int:
        """Maximum number of blocks that a sequence of `num_tokens` owns while a step computes `step_tokens` of it."""
        total = -(-num_tokens // self.block_size)
        return min(total, self.span_blocks(step_tokens)) if self.num_tokens else total

    def span_blocks(self, step_tokens: int) -> int:
        """Maximum number of blocks that `step_tokens` consecutive tokens and the keys they attend to span."""
        return (self.num_tokens + step_tokens + self.block_size - 3) // self.block_size + 1

    def longest(self, num_blocks: int, max_model_len: int) -> int:
        """Length of the longest sequence that fits in `num_blocks`, at most `max_model_len`."""
        if self.num_tokens and num_blocks >= self.span_blocks(1) + SPARE_BLOCKS:
            return max_model_len
        return min(max_model_len, num_blocks * self.block_size)
