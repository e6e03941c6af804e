"""Which blocks a sequence needs whose model looks back through a sliding window in every layer. Pure.

    table   [ HOLE HOLE | in the window ... | behind the newest token ]
              given back  owned

The token at position p sees the keys from p - window + 1 to p. Positions only grow, so a block is out of the window for
good once the next token does not see it any more.
"""

from __future__ import annotations

from dataclasses import dataclass

HOLE = -1
"""The entry of a block table whose block was given back, or never needed. No kernel follows it."""
SPARE_BLOCKS = 2
"""Blocks beyond those of one step: a step in flight writes one token ahead, and each end of a span may cut a block."""


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """Cached blocks that a sequence may start from: those of its table from `first` on. It needs none before."""

    first: int
    blocks: list[int]

    @property
    def end(self) -> int:
        """How many leading blocks need not be computed."""
        return self.first + len(self.blocks)


@dataclass(frozen=True, slots=True)
class Window:
    """`num_tokens`: the widest of the layers' windows; 0: some layer sees all, so every block is needed to the end."""

    num_tokens: int
    block_size: int

    def __bool__(self) -> bool:
        return self.num_tokens > 0

    def first_block(self, position: int) -> int:
        """The first block that the token at `position` sees, and so the first that it and later ones need."""
        return max(0, position + 1 - self.num_tokens) // self.block_size if self.num_tokens else 0

    def most_blocks(self, num_tokens: int, step_tokens: int = 1) -> int:
        """The most blocks that a sequence of `num_tokens` owns at once, while a step computes `step_tokens` of it."""
        total = -(-num_tokens // self.block_size)
        return min(total, self.span_blocks(step_tokens)) if self.num_tokens else total

    def span_blocks(self, step_tokens: int) -> int:
        """The most blocks that `step_tokens` tokens in a row and all that they see lie in."""
        return (self.num_tokens + step_tokens + self.block_size - 3) // self.block_size + 1

    def longest(self, num_blocks: int, max_model_len: int) -> int:
        """The longest sequence that a cache of `num_blocks` takes, of a model that takes `max_model_len` tokens."""
        if self.num_tokens and num_blocks >= self.span_blocks(1) + SPARE_BLOCKS:
            return max_model_len
        return min(max_model_len, num_blocks * self.block_size)
