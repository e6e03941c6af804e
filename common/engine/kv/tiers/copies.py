"""Staging buffers between a cache and its tiers: the block may be evicted from the cache during the copy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from common.engine.kv.cache import KVCache
from common.engine.kv.copy_stream import CopyStream
from common.engine.kv.sharded_cache import ShardedCache
from common.engine.kv.staging import (
    IncomingBlocks,
    OutgoingBlocks,
    StagedIncoming,
    StagedOutgoing,
    incoming_blocks,
    outgoing_blocks,
)


class CopiedOutgoing:
    """`view` copies a block of host memory into a single buffer, valid until the next call."""

    def __init__(self, kv: KVCache) -> None:
        self._kv, self._buffer = kv, np.empty(kv.block_bytes, np.uint8)

    def view(self, index: int) -> memoryview:
        np.copyto(self._buffer, np.frombuffer(self._kv.block(index), np.uint8))  # releases the GIL
        return self._buffer.data


class CopiedIncoming:
    """Blocks are read into a single buffer; `commit` copies it into the cache."""

    def __init__(self, kv: KVCache) -> None:
        self._kv, self._buffer = kv, np.empty(kv.block_bytes, np.uint8)

    def num_bytes(self, index: int) -> int:
        return len(self._buffer)

    def view(self, index: int) -> memoryview:
        return self._buffer.data

    def commit(self, indices: Sequence[int]) -> None:
        """`indices` contains only the block read last."""
        (index,) = indices
        np.copyto(np.frombuffer(self._kv.block(index), np.uint8), self._buffer)


def copied_outgoing(kv: KVCache) -> OutgoingBlocks:
    """Create the writing side, for one block at a time."""
    if isinstance(kv, ShardedCache):
        return outgoing_blocks(kv)  # already copies
    return CopiedOutgoing(kv) if kv.in_host_memory else StagedOutgoing(kv, CopyStream(kv.device)).reserve(1)


def copied_incoming(kv: KVCache) -> IncomingBlocks:
    """Create the reading side, for one block at a time."""
    if isinstance(kv, ShardedCache):
        return incoming_blocks(kv)
    return CopiedIncoming(kv) if kv.in_host_memory else StagedIncoming(kv, CopyStream(kv.device)).reserve(1)
