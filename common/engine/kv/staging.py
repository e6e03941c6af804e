"""KV blocks as bytes in host memory, for the wire, independent of the cache's device.

A cache in host memory is read and written in place. Blocks of a GPU are staged in buffers pinned at startup and copied
on a separate stream, concurrently with the kernels of the next step. The engine passes only blocks that no step in
flight uses, so copies do not wait for steps. When more blocks are in flight, they use unpinned memory, because pinning
would delay step launches.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from queue import Empty, SimpleQueue
from typing import Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from common.engine.kv.cache import KVCache
from common.engine.kv.checksums import checksum, checksum_of_parts
from common.engine.kv.copy_stream import CopyStream
from common.engine.kv.sharded_cache import ShardedCache


class OutgoingBlocks(Protocol):
    """Source of the blocks that a sender reads, on one thread."""

    def view(self, index: int) -> memoryview:
        """Return the bytes of a block. They do not change while the view, or a frame made of it, exists."""


@runtime_checkable
class RingSource(Protocol):
    """Outgoing blocks that other processes cannot map, but that can be copied to a ring. Used by one thread."""

    block_bytes: int
    """Size of the largest block, and so of a slot."""
    stream: CopyStream

    def num_bytes(self, index: int) -> int:
        """Return the size of a block."""

    def copy_all(self, copies: Sequence[tuple[int, Tensor]]) -> list[int]:
        """Copy each block to the beginning of its slot, uint8 [block_bytes]. Returns checksums of the bytes there."""


class IncomingBlocks(Protocol):
    """Target of the blocks that a receiver writes, on one thread."""

    def num_bytes(self, index: int) -> int:
        """Return the size of a block's view."""

    def view(self, index: int) -> memoryview:
        """Return the memory to receive a block into."""

    def commit(self, indices: Sequence[int]) -> None:
        """Copy these completely received blocks into the cache. Invalidates all views."""


class BlocksInPlace:
    """Blocks of a cache in host memory, for both directions: the views are the cache itself."""

    def __init__(self, kv: KVCache) -> None:
        self._kv = kv

    @property
    def region(self) -> tuple[int, int]:
        """Address and size in bytes of the cache."""
        return self._kv.tensor.data_ptr(), self._kv.tensor.nbytes

    def num_bytes(self, index: int) -> int:
        return self._kv.block_bytes

    def view(self, index: int) -> memoryview:
        return self._kv.block(index)

    def commit(self, indices: Sequence[int]) -> None:
        """Nothing to copy."""


class LentBuffers:
    """Buffers in host memory that are reused once nothing references the views lent of them.

    The number of buffers is the number reserved or, if greater, the number of views in use.
    """

    def __init__(self, stream: CopyStream, num_bytes: int) -> None:
        self.stream, self.block_bytes = stream, num_bytes
        self._free: SimpleQueue[Tensor] = SimpleQueue()  # any thread may be the last to drop a view
        self.num_buffers = 0

    def reserve(self, count: int) -> Self:
        """Pin buffers for `count` blocks if the device requires pinned memory."""
        if self.stream.pins:
            for buffer in self.stream.buffers(self.block_bytes, count):
                self._free.put(buffer)
            self.num_buffers += count
        return self

    def take(self) -> Tensor:
        """Return a buffer, uint8 [block_bytes], which is the caller's until `lend`."""
        try:
            return self._free.get_nowait()
        except Empty:
            self.num_buffers += 1
            return self.stream.spare(self.block_bytes)

    def lend(self, buffer: Tensor, num_bytes: int | None = None) -> memoryview:
        """Return the first bytes of a buffer, which is free again once nothing references them."""
        exporter = buffer[:num_bytes].numpy()
        weakref.finalize(exporter, self._free.put, buffer).atexit = False
        return exporter.data


class StagedOutgoing(LentBuffers):
    """`view` copies a block into a buffer, which is reused once its view is dropped.

    The sockets' high-water marks bound the blocks in flight, and so the number of buffers.
    """

    def __init__(self, kv: KVCache, stream: CopyStream) -> None:
        super().__init__(stream, kv.block_bytes)
        self._kv = kv

    def view(self, index: int) -> memoryview:
        buffer = self.take()
        self._fill(buffer, index)
        return self.lend(buffer)

    def num_bytes(self, index: int) -> int:
        return self.block_bytes

    def copy(self, index: int, place: Tensor) -> int:
        """Copy a block into `place`, uint8 [block_bytes] of host memory. Returns the checksum of the bytes there."""
        view = place.numpy().data
        parts = self.stream.in_parts(place, block_bytes_of(self._kv, index))
        return checksum_of_parts(view[part] for part in parts)

    def copy_all(self, copies: Sequence[tuple[int, Tensor]]) -> list[int]:
        """Call `copy` for the blocks of a message."""
        return [self.copy(index, place) for index, place in copies]

    def _fill(self, buffer: Tensor, index: int) -> None:
        self.stream.run([(buffer, block_bytes_of(self._kv, index))])


class StagedIncoming:
    """Blocks are received in buffers; `commit` copies them into the cache together.

    The number of buffers is the number reserved or, if greater, the number of blocks per message, because the receiver
    commits after each message.
    """

    def __init__(self, kv: KVCache, stream: CopyStream) -> None:
        self._kv, self.stream = kv, stream
        self._free: list[Tensor] = []
        self._in_use: dict[int, Tensor] = {}
        self.block_bytes = kv.block_bytes

    def reserve(self, count: int) -> Self:
        """Pin buffers for `count` blocks if the device requires pinned memory."""
        if self.stream.pins:
            self._free += self.stream.buffers(self.block_bytes, count)
        return self

    def num_bytes(self, index: int) -> int:
        return self.block_bytes

    def view(self, index: int) -> memoryview:
        if index not in self._in_use:
            self._in_use[index] = self._free.pop() if self._free else self.stream.spare(self.block_bytes)
        return self._in_use[index].numpy().data

    def commit(self, indices: Sequence[int]) -> None:
        self._store([(index, self._in_use[index]) for index in indices])
        self._free.extend(self._in_use.values())
        self._in_use.clear()

    def copy(self, place: Tensor, index: int) -> int:
        """Copy `place`, uint8 [block_bytes] registered with `stream`, into the cache without a buffer.

        Returns the checksum of the bytes in `place` after the copy. If it equals the sender's, the copy is correct,
        even if another process may write to `place` concurrently.
        """
        view = place.numpy().data
        parts = self.stream.in_parts(block_bytes_of(self._kv, index), place)
        return checksum_of_parts(view[part] for part in parts)

    def copy_all(self, copies: Iterable[tuple[Tensor | None, int]]) -> Iterator[int | None]:
        """Call `copy` lazily for each pair; yields None for a pair without a place."""
        for place, index in copies:
            yield None if place is None else self.copy(place, index)

    def _store(self, received: Sequence[tuple[int, Tensor]]) -> None:
        self.stream.run([(block_bytes_of(self._kv, index), buffer) for index, buffer in received])


class GatheredOutgoing(StagedOutgoing):
    """`view` gathers a block from the caches of all ranks."""

    def __init__(self, kv: ShardedCache, stream: CopyStream) -> None:
        super().__init__(kv, stream)
        self._sharded, self.block_bytes = kv, kv.wire_bytes

    def views(self, indices: Sequence[int]) -> list[memoryview]:
        """Return a `view` of each block, with one wait for all."""
        buffers = [self.take() for _ in indices]
        self._gather(list(zip(indices, buffers, strict=True)))
        return [self.lend(buffer) for buffer in buffers]

    def copy(self, index: int, place: Tensor) -> int:
        return self.copy_all([(index, place)])[0]

    def copy_all(self, copies: Sequence[tuple[int, Tensor]]) -> list[int]:
        self._gather(copies)
        return [checksum(place.numpy().data) for _, place in copies]

    def _fill(self, buffer: Tensor, index: int) -> None:
        self._gather([(index, buffer)])

    def _gather(self, blocks: Sequence[tuple[int, Tensor]]) -> None:
        def run() -> None:
            for index, block in blocks:
                self._sharded.gather(index, block)

        self.stream.wait_for(run)


class ScatteredIncoming(StagedIncoming):
    """Blocks are received in buffers; `commit` scatters them to the caches of all ranks."""

    def __init__(self, kv: ShardedCache, stream: CopyStream) -> None:
        super().__init__(kv, stream)
        self._sharded, self.block_bytes = kv, kv.wire_bytes

    def copy_all(self, copies: Iterable[tuple[Tensor | None, int]]) -> Iterator[int | None]:
        """Scatter all blocks of a message, with one wait for all."""
        known = list(copies)
        self._store([(index, place) for place, index in known if place is not None])
        for place, _ in known:
            yield None if place is None else checksum(place.numpy().data)

    def _store(self, received: Sequence[tuple[int, Tensor]]) -> None:
        def run() -> None:
            for index, block in received:
                self._sharded.scatter(block, index)

        self.stream.wait_for(run)


def outgoing_blocks(kv: KVCache, at_once: int = 1) -> OutgoingBlocks:
    """Create the sending side for a worker that usually has up to `at_once` blocks in its sockets."""
    if isinstance(kv, ShardedCache):
        return GatheredOutgoing(kv, CopyStream(kv.device)).reserve(at_once)
    return BlocksInPlace(kv) if kv.in_host_memory else StagedOutgoing(kv, CopyStream(kv.device)).reserve(at_once)


def incoming_blocks(kv: KVCache, at_once: int = 1) -> IncomingBlocks:
    """Create the receiving side for messages of up to `at_once` blocks."""
    if isinstance(kv, ShardedCache):
        return ScatteredIncoming(kv, CopyStream(kv.device)).reserve(at_once)
    return BlocksInPlace(kv) if kv.in_host_memory else StagedIncoming(kv, CopyStream(kv.device)).reserve(at_once)


def block_bytes_of(kv: KVCache, index: int) -> Tensor:
    """View one block as uint8 [block_bytes] on its device. Raises BlockError if the index is out of range."""
    return kv.block_tensor(index).view(-1).view(torch.uint8)
