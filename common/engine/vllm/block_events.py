"""Contents of vLLM's prefix cache, in hashes that routers know.

vLLM publishes stored and removed blocks under its own hashes, with their tokens. Each stored block continues a known
one, so its chained hash (`common.blocks.BlockHasher`) follows from that of its parent.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from common.blocks import BlockHasher
from common.engine.kv import BlockLog

log = logging.getLogger(__name__)
Hash = int | bytes
"""Hash of vLLM, whose form depends on its settings."""


class BlockStored(msgspec.Struct, tag="BlockStored", gc=False):
    """Blocks that follow `parent_block_hash`. The names of the fields are vLLM's, here and below."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    lora_name: str | None = None
    medium: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None


class BlockRemoved(msgspec.Struct, tag="BlockRemoved", gc=False):
    block_hashes: list[Hash]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag="AllBlocksCleared", gc=False):
    pass


class EventBatch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


_batches = msgspec.msgpack.Decoder(EventBatch)
GPU: Literal["GPU"] = "GPU"


class CachedBlocks:
    """vLLM's prefix cache. Not thread-safe, except for the `BlockLog`.

    Only the blocks of the first group of layers count. They are those of full attention if there are any.
    """

    def __init__(self, block_size: int, block_log: BlockLog) -> None:
        self._block_size, self._log = block_size, block_log
        self._ours: dict[Hash, bytes] = {}
        self._held: set[bytes] = set()
        self._next = 0
        self.num_unknown = 0
        """Stored blocks that follow an unknown one."""

    def on_batch(self, number: int, packed: bytes) -> None:
        """Apply the batch with this sequence number. A gap drops all blocks, because removals may be missing.

        Raises msgspec.MsgspecError for invalid data.
        """
        if number != self._next:
            if self._next:
                log.warning("vllm: lost %d batches of block events", number - self._next)
            self.clear()
        self._next = number + 1
        for event in _batches.decode(packed).events:
            match event:
                case BlockStored() if self._counts(event.medium, event.group_idx):
                    self._store(event)
                case BlockRemoved() if self._counts(event.medium, event.group_idx):
                    self._remove(event)
                case AllBlocksCleared():
                    self.clear()

    def clear(self) -> None:
        """Forget all blocks."""
        if self._ours:
            self._ours.clear()
            self._held.clear()
            self._log.cleared()

    def num_leading(self, hashes: Sequence[bytes]) -> int:
        """Return the number of leading blocks of a prompt that are cached, by the hashes of its blocks."""
        return next((number for number, one in enumerate(hashes) if one not in self._held), len(hashes))

    def __len__(self) -> int:
        return len(self._held)

    def _counts(self, medium: str | None, group: int | None) -> bool:
        return medium in (None, GPU) and group in (None, 0)

    def _store(self, event: BlockStored) -> None:
        if event.block_size != self._block_size:
            return  # the end of a prompt, or blocks of another size
        if (hasher := self._hasher(event)) is None:
            self.num_unknown += len(event.block_hashes)
            return
        for theirs, ours in zip(event.block_hashes, hasher.extend(event.token_ids), strict=False):
            if theirs not in self._ours:
                self._ours[theirs] = ours
                self._held.add(ours)
                self._log.stored(ours)

    def _hasher(self, event: BlockStored) -> BlockHasher | None:
        """Return a hasher that continues the parent of stored blocks, or None if it is unknown."""
        if event.parent_block_hash is None:
            keys = list(event.extra_keys[0] or ()) if event.extra_keys else []
            salts = [key for key in keys if isinstance(key, str) and key != event.lora_name]
            return BlockHasher(self._block_size, salts[0] if salts else "", event.lora_name or "")
        if (parent := self._ours.get(event.parent_block_hash)) is None:
            return None
        return BlockHasher.after(parent, self._block_size)

    def _remove(self, event: BlockRemoved) -> None:
        for theirs in event.block_hashes:
            if (ours := self._ours.pop(theirs, None)) is not None:
                self._held.discard(ours)
                self._log.removed(ours)
