"""The blocks that a worker can lend: those of its prefix cache, and of the tiers below it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.engine.kv import BlockPool
from common.engine.kv.tiers import BlockTiers

if TYPE_CHECKING:
    from common.engine.kv import OutgoingBlocks


@dataclass(frozen=True, slots=True)
class LentBlock:
    """The bytes of a block. `source` is its number in the cache that others may map; None for a copy."""

    block_hash: bytes
    view: memoryview
    source: int | None


class Lendable:
    """Used by the lender's thread alone, which waits for no other. `outgoing` gives views of the cache's blocks."""

    def __init__(
        self, pool: BlockPool, outgoing: OutgoingBlocks, block_bytes: int, tiers: BlockTiers | None = None
    ) -> None:
        self._pool, self._outgoing, self._tiers = pool, outgoing, tiers
        self.block_bytes, self.num_blocks = block_bytes, pool.num_blocks

    def find(self, block_hash: bytes) -> LentBlock | None:
        """The block, if it is here. A cached block may change at any time: ask `is_still` after reading it."""
        if (block := self._pool.find(block_hash)) is not None:
            return LentBlock(block_hash, self._outgoing.view(block), block)
        copy = self._tiers.copy_of(block_hash) if self._tiers is not None else None
        return LentBlock(block_hash, copy, None) if copy is not None else None

    def is_still(self, block: LentBlock) -> bool:
        """Whether nothing was written to the block since `find`."""
        return block.source is None or self._pool.is_published(block.source, block.block_hash)
