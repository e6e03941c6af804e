"""KV blocks as 8-bit numbers in host memory, for the wire: half the bytes of bfloat16, a quarter of float32's.

They pass through buffers even if the cache is in host memory. A GPU quantises before the copy to host memory and
dequantises after the copy from it. The format is that of `kernels.blocks`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from common.kv.cache import KVCache
from common.kv.copy_stream import CopyStream
from common.kv.sharded_cache import ShardedCache
from common.kv.staging import StagedIncoming, StagedOutgoing
from kernels import gather_blocks, scatter_blocks, wire_bytes


class QuantisedOutgoing(StagedOutgoing):
    """`view` quantises a block into a buffer. All its numbers must be finite, in unused slots too."""

    def __init__(self, kv: KVCache, stream: CopyStream) -> None:
        super().__init__(kv, stream)
        self._row = _Row(kv)
        self.block_bytes = self._row.num_bytes

    def _fill(self, buffer: Tensor, index: int) -> None:
        self.stream.wait_for(lambda: self._row.gather(index, buffer))


class QuantisedIncoming(StagedIncoming):
    """Blocks arrive in buffers; `commit` dequantises them into the cache."""

    def __init__(self, kv: KVCache, stream: CopyStream) -> None:
        super().__init__(kv, stream)
        self._row = _Row(kv)
        self.block_bytes = self._row.num_bytes

    def _store(self, received: Sequence[tuple[int, Tensor]]) -> None:
        def dequantise() -> None:
            for index, buffer in received:  # in the stream's order: the one row serves them all
                self._row.scatter(buffer, index)

        self.stream.wait_for(dequantise)


class _Row:
    """Quantises between a block and a buffer in host memory: on a GPU through one quantised block of its memory.

    A block of several ranks is quantised as a whole, which one more block of memory holds.
    """

    def __init__(self, kv: KVCache) -> None:
        self._kv = kv
        self._whole = kv.new_block() if isinstance(kv, ShardedCache) else None
        block = kv.tensor[0] if self._whole is None else self._whole
        self.num_bytes = wire_bytes(block[None], quantised=True)
        on_host = kv.device.type == "cpu"
        self._row = None if on_host else torch.empty(1, self.num_bytes, dtype=torch.uint8, device=kv.device)
        self._only = torch.tensor([0]).to(kv.device)  # waits, because another stream reads it

    def gather(self, index: int, buffer: Tensor) -> None:
        block = self._kv.block_tensor(index) if self._whole is None else self._whole
        if isinstance(self._kv, ShardedCache):
            self._kv.gather(index, _bytes_of(block))
        row = buffer[None] if self._row is None else self._row
        gather_blocks(block[None], self._only, quantised=True, out=row)
        if self._row is not None:
            buffer.copy_(self._row[0], non_blocking=True)

    def scatter(self, buffer: Tensor, index: int) -> None:
        block = self._kv.block_tensor(index) if self._whole is None else self._whole
        if self._row is not None:
            self._row[0].copy_(buffer, non_blocking=True)
        scatter_blocks(buffer[None] if self._row is None else self._row, block[None], self._only, quantised=True)
        if isinstance(self._kv, ShardedCache):
            self._kv.scatter(_bytes_of(block), index)


def _bytes_of(block: Tensor) -> Tensor:
    return block.view(-1).view(torch.uint8)


def quantised_outgoing(kv: KVCache, at_once: int = 1) -> QuantisedOutgoing:
    """Quantises one block now, so that a GPU's kernel is compiled before a transfer needs it. `at_once` as
    `outgoing_blocks`."""
    blocks = QuantisedOutgoing(kv, CopyStream(kv.device)).reserve(at_once)
    blocks.view(0)
    return blocks


def quantised_incoming(kv: KVCache, at_once: int = 1) -> QuantisedIncoming:
    """Dequantises a block of zeros now, so that a GPU's kernel is compiled before a transfer needs it.

    Call it while the cache is empty: it writes block 0.
    """
    blocks = QuantisedIncoming(kv, CopyStream(kv.device)).reserve(at_once)
    blocks.view(0)[:] = bytes(blocks.block_bytes)
    blocks.commit([0])
    return blocks
