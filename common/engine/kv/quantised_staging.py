"""KV blocks as 8-bit integers for the wire: half the bytes of bfloat16, a quarter of float32.

Blocks are staged in buffers even if the cache is in host memory. A GPU quantises before the copy to host memory and
dequantises after the copy from it. See `kernels.blocks` for the format.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from common.engine.kv.cache import KVCache
from common.engine.kv.copy_stream import CopyStream
from common.engine.kv.sharded_cache import ShardedCache
from common.engine.kv.staging import StagedIncoming, StagedOutgoing
from kernels import gather_blocks, scatter_blocks, wire_bytes


class QuantisedOutgoing(StagedOutgoing):
    """`view` quantises a block into a buffer. All elements must be finite, including those of unused slots."""

    def __init__(self, kv: KVCache, stream: CopyStream) -> None:
        super().__init__(kv, stream)
        self._row = _Row(kv)
        self.block_bytes = self._row.num_bytes

    def views(self, indices: Sequence[int]) -> list[memoryview]:
        """Return a `view` of each block, with one device synchronisation."""
        buffers = [self.take() for _ in indices]
        self.stream.wait_for(lambda: self._row.gather(list(zip(indices, buffers, strict=True))))
        return [self.lend(buffer) for buffer in buffers]

    def _fill(self, buffer: Tensor, index: int) -> None:
        self.stream.wait_for(lambda: self._row.gather([(index, buffer)]))


class QuantisedIncoming(StagedIncoming):
    """Blocks arrive in buffers; `commit` dequantises them into the cache."""

    def __init__(self, kv: KVCache, stream: CopyStream) -> None:
        super().__init__(kv, stream)
        self._row = _Row(kv)
        self.block_bytes = self._row.num_bytes

    def _store(self, received: Sequence[tuple[int, Tensor]]) -> None:
        self.stream.wait_for(lambda: self._row.scatter(received))


class _Row:
    """Quantises between blocks and buffers in host memory.

    On a GPU, data passes through one quantised block of device memory, reused in stream order. A block split across
    ranks is quantised as a whole.
    """

    def __init__(self, kv: KVCache) -> None:
        self._kv = kv
        block = self._whole = kv.new_block() if isinstance(kv, ShardedCache) else kv.tensor[0]
        self.num_bytes = wire_bytes(block[None], quantised=True)
        on_host = kv.device.type == "cpu"
        self._row = None if on_host else torch.empty(1, self.num_bytes, dtype=torch.uint8, device=kv.device)
        self._only = torch.tensor([0]).to(kv.device)  # blocking, because another stream reads it

    def gather(self, wanted: Sequence[tuple[int, Tensor]]) -> None:
        """Quantise blocks into buffers, given (index, buffer) pairs."""
        for index, buffer in wanted:
            if isinstance(self._kv, ShardedCache):
                self._kv.gather(index, _bytes_of(self._whole))
                self._quantise(self._whole, buffer)
            else:
                self._quantise(self._kv.block_tensor(index), buffer)

    def scatter(self, received: Sequence[tuple[int, Tensor]]) -> None:
        """Dequantise buffers into blocks, given (index, buffer) pairs."""
        for index, buffer in received:
            if isinstance(self._kv, ShardedCache):
                self._dequantise(buffer, self._whole)
                self._kv.scatter(_bytes_of(self._whole), index)
            else:
                self._dequantise(buffer, self._kv.block_tensor(index))

    def _quantise(self, block: Tensor, buffer: Tensor) -> None:
        row = buffer[None] if self._row is None else self._row
        gather_blocks(block[None], self._only, quantised=True, out=row)
        if self._row is not None:
            buffer.copy_(self._row[0], non_blocking=True)

    def _dequantise(self, buffer: Tensor, block: Tensor) -> None:
        if self._row is not None:
            self._row[0].copy_(buffer, non_blocking=True)
        scatter_blocks(buffer[None] if self._row is None else self._row, block[None], self._only, quantised=True)


def _bytes_of(block: Tensor) -> Tensor:
    return block.view(-1).view(torch.uint8)


def quantised_outgoing(kv: KVCache, at_once: int = 1) -> QuantisedOutgoing:
    """Create the sending side. Quantises one block, so that a GPU kernel is compiled before the first transfer.

    `at_once`: as for `outgoing_blocks`.
    """
    blocks = QuantisedOutgoing(kv, CopyStream(kv.device)).reserve(at_once)
    blocks.view(0)
    return blocks


def quantised_incoming(kv: KVCache, at_once: int = 1) -> QuantisedIncoming:
    """Create the receiving side. Dequantises one block, so that a GPU kernel is compiled before the first transfer.

    Writes zeros to block 0: call it while the cache is empty.
    """
    blocks = QuantisedIncoming(kv, CopyStream(kv.device)).reserve(at_once)
    blocks.view(0)[:] = bytes(blocks.block_bytes)
    blocks.commit([0])
    return blocks
