"""KV blocks as bytes in host memory, for the wire, wherever the cache is.

A cache in host memory is read and written in place. Blocks of a GPU pass through buffers that were pinned when the
worker started: a stream of their own copies them beside the kernels of the next step. The engine lends only blocks that
no step in flight touches, so the copies need not wait for any. More blocks at once pass through memory that is not
pinned, because pinning would hold up the launches of steps.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from queue import Empty, SimpleQueue
from typing import Protocol, Self

import torch
from torch import Tensor

from common.engine.kv.cache import KVCache
from common.engine.kv.checksums import checksum, checksum_of_parts
from common.engine.kv.copy_stream import CopyStream
from common.engine.kv.sharded_cache import ShardedCache


class OutgoingBlocks(Protocol):
    """A sender reads blocks from this, in one thread."""

    def view(self, index: int) -> memoryview:
        """The bytes of a block. They do not change while the view, or a frame made of it, lives."""


class IncomingBlocks(Protocol):
    """A receiver writes blocks to this, in one thread."""

    def view(self, index: int) -> memoryview:
        """The memory that the bytes of a block arrive in."""

    def commit(self, indices: Sequence[int]) -> None:
        """Copy these blocks, all received whole, into the cache. Invalidates all views."""


class BlocksInPlace:
    """Blocks of a cache in host memory, both ways: the views are the cache itself."""

    def __init__(self, kv: KVCache) -> None:
        self._kv = kv

    def view(self, index: int) -> memoryview:
        return self._kv.block(index)

    def commit(self, indices: Sequence[int]) -> None:
        """Nothing to copy."""


class StagedOutgoing:
    """`view` copies a block into a buffer, which is used again once its view is gone.

    There are as many buffers as blocks that were sent at once, which the sockets' high-water marks bound, or as were
    reserved.
    """

    def __init__(self, kv: KVCache, stream: CopyStream) -> None:
        self._kv, self.stream = kv, stream
        self._free: SimpleQueue[Tensor] = SimpleQueue()  # any thread may be the last to drop a view
        self.num_buffers = 0
        self.block_bytes = kv.block_bytes

    def reserve(self, count: int) -> Self:
        """Pins buffers for `count` blocks, where a device needs them pinned."""
        if self.stream.pins:
            for buffer in self.stream.buffers(self.block_bytes, count):
                self._free.put(buffer)
            self.num_buffers += count
        return self

    def view(self, index: int) -> memoryview:
        buffer = self._take()
        self._fill(buffer, index)
        return self._lent(buffer)

    def copy(self, index: int, place: Tensor) -> int:
        """Copy a block into `place`, uint8 [block_bytes] of host memory; the checksum of the bytes there."""
        view = place.numpy().data
        parts = self.stream.in_parts(place, block_bytes_of(self._kv, index))
        return checksum_of_parts(view[part] for part in parts)

    def copy_all(self, copies: Sequence[tuple[int, Tensor]]) -> list[int]:
        """`copy`, for the blocks of a message."""
        return [self.copy(index, place) for index, place in copies]

    def _fill(self, buffer: Tensor, index: int) -> None:
        self.stream.run([(buffer, block_bytes_of(self._kv, index))])

    def _lent(self, buffer: Tensor) -> memoryview:
        """The bytes of a buffer, which is free again once nothing refers to them."""
        exporter = buffer.numpy()
        weakref.finalize(exporter, self._free.put, buffer).atexit = False
        return exporter.data

    def _take(self) -> Tensor:
        try:
            return self._free.get_nowait()
        except Empty:
            self.num_buffers += 1
            return self.stream.spare(self.block_bytes)


class StagedIncoming:
    """Blocks arrive in buffers; `commit` copies them into the cache together.

    There are as many buffers as blocks in one message, because the receiver commits after each, or as were reserved.
    """

    def __init__(self, kv: KVCache, stream: CopyStream) -> None:
        self._kv, self.stream = kv, stream
        self._free: list[Tensor] = []
        self._in_use: dict[int, Tensor] = {}
        self.block_bytes = kv.block_bytes

    def reserve(self, count: int) -> Self:
        """Pins buffers for `count` blocks, where a device needs them pinned."""
        if self.stream.pins:
            self._free += self.stream.buffers(self.block_bytes, count)
        return self

    def view(self, index: int) -> memoryview:
        if index not in self._in_use:
            self._in_use[index] = self._free.pop() if self._free else self.stream.spare(self.block_bytes)
        return self._in_use[index].numpy().data

    def commit(self, indices: Sequence[int]) -> None:
        self._store([(index, self._in_use[index]) for index in indices])
        self._free.extend(self._in_use.values())
        self._in_use.clear()

    def copy(self, place: Tensor, index: int) -> int:
        """Copy `place`, uint8 [block_bytes] that `stream` registered, into the cache without a buffer.

        The checksum is of the bytes that are in the place after they were copied: if it is the sender's, no other bytes
        were copied, even if another process writes there meanwhile.
        """
        view = place.numpy().data
        parts = self.stream.in_parts(block_bytes_of(self._kv, index), place)
        return checksum_of_parts(view[part] for part in parts)

    def copy_all(self, copies: Iterable[tuple[Tensor | None, int]]) -> Iterator[int | None]:
        """`copy`, one after the other as they are asked for; None where there is no place."""
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
        """`view` of each: ranks of other hosts are asked for all blocks before the first has come."""
        buffers = [self._take() for _ in indices]
        self.stream.wait_for(lambda: self._sharded.gather_all(list(zip(indices, buffers, strict=True))))
        return [self._lent(buffer) for buffer in buffers]

    def copy(self, index: int, place: Tensor) -> int:
        return self.copy_all([(index, place)])[0]

    def copy_all(self, copies: Sequence[tuple[int, Tensor]]) -> list[int]:
        """Gathered together: other hosts are asked for all blocks of the message at once."""
        self.stream.wait_for(lambda: self._sharded.gather_all(copies))
        return [checksum(place.numpy().data) for _, place in copies]

    def _fill(self, buffer: Tensor, index: int) -> None:
        self.stream.wait_for(lambda: self._sharded.gather(index, buffer))


class ScatteredIncoming(StagedIncoming):
    """Blocks arrive in buffers; `commit` scatters them over the caches of all ranks."""

    def __init__(self, kv: ShardedCache, stream: CopyStream) -> None:
        super().__init__(kv, stream)
        self._sharded, self.block_bytes = kv, kv.wire_bytes

    def copy_all(self, copies: Iterable[tuple[Tensor | None, int]]) -> Iterator[int | None]:
        """Scattered together: other hosts confirm all blocks of the message at once."""
        known = list(copies)
        found = [(index, place) for place, index in known if place is not None]
        self.stream.wait_for(lambda: self._sharded.scatter_all(found))
        for place, _ in known:
            yield None if place is None else checksum(place.numpy().data)

    def _store(self, received: Sequence[tuple[int, Tensor]]) -> None:
        self.stream.wait_for(lambda: self._sharded.scatter_all(received))


def outgoing_blocks(kv: KVCache, at_once: int = 1) -> OutgoingBlocks:
    """For a worker that usually sends up to `at_once` blocks while others wait in its sockets."""
    if isinstance(kv, ShardedCache):
        return GatheredOutgoing(kv, CopyStream(kv.device)).reserve(at_once)
    return BlocksInPlace(kv) if kv.in_host_memory else StagedOutgoing(kv, CopyStream(kv.device)).reserve(at_once)


def incoming_blocks(kv: KVCache, at_once: int = 1) -> IncomingBlocks:
    """For messages of up to `at_once` blocks."""
    if isinstance(kv, ShardedCache):
        return ScatteredIncoming(kv, CopyStream(kv.device)).reserve(at_once)
    return BlocksInPlace(kv) if kv.in_host_memory else StagedIncoming(kv, CopyStream(kv.device)).reserve(at_once)


def block_bytes_of(kv: KVCache, index: int) -> Tensor:
    """One block as uint8 [block_bytes] on its device, no copy. BlockError when it is out of range."""
    return kv.block_tensor(index).view(-1).view(torch.uint8)
