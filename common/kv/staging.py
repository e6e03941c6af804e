"""KV blocks as bytes in host memory, for the wire, wherever the cache is.

A cache in host memory is read and written in place. Blocks of a GPU pass through pinned buffers, copied by a stream of
their own beside the kernels of the next step. The engine hands out only blocks that no step in flight touches, so these
copies wait for nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Protocol

import torch
from torch import Tensor

from common.kv.cache import KVCache


class OutgoingBlocks(Protocol):
    """What a sender reads from; for one thread."""

    def view(self, index: int) -> memoryview:
        """The bytes of a block; they stay as they are for as long as the view, or a frame made of it, lives."""


class IncomingBlocks(Protocol):
    """What a receiver writes to; for one thread."""

    def view(self, index: int) -> memoryview:
        """Where the bytes of a block are to arrive."""

    def commit(self, indices: Sequence[int]) -> None:
        """Copies these blocks, all received whole, into the cache. Views handed out before are void."""


class BlocksInPlace:
    """Of a cache in host memory, both ways: the views are the cache itself."""

    def __init__(self, kv: KVCache) -> None:
        self._kv = kv

    def view(self, index: int) -> memoryview:
        return self._kv.block(index)

    def commit(self, indices: Sequence[int]) -> None:
        """They are there already."""


class CopyStream:
    """Copies between a device and host memory that it can reach directly. On the CPU, plain copies."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def buffer(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes] of host memory."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._stream is not None)

    def run(self, copies: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Copy (target, source) pairs and wait for them, leaving the interpreter to others meanwhile."""

        def copy() -> None:
            for target, source in copies:
                target.copy_(source, non_blocking=True)

        self.wait_for(copy)

    def wait_for(self, work: Callable[[], None]) -> None:
        """Let `work` launch what it will on this stream, and wait for that."""
        if self._stream is None:
            work()
            return
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            work()
        self._stream.synchronize()


class StagedOutgoing:
    """A block is copied into a buffer when it is asked for; the buffer is used again once nobody looks at it.

    There are as many buffers as blocks are being sent at once, which the sockets' high-water marks bound.
    """

    def __init__(self, kv: KVCache, stream: CopyStream) -> None:
        self._kv, self._stream = kv, stream
        self._free: SimpleQueue[Tensor] = SimpleQueue()  # given back by whichever thread drops a view last
        self.num_buffers = 0
        self.block_bytes = kv.block_bytes

    def view(self, index: int) -> memoryview:
        buffer = self._take()
        self._fill(buffer, index)
        exporter = buffer.numpy()
        weakref.finalize(exporter, self._free.put, buffer).atexit = False
        return exporter.data

    def _fill(self, buffer: Tensor, index: int) -> None:
        self._stream.run([(buffer, block_bytes_of(self._kv, index))])

    def _take(self) -> Tensor:
        try:
            return self._free.get_nowait()
        except Empty:
            self.num_buffers += 1
            return self._stream.buffer(self.block_bytes)


class StagedIncoming:
    """Blocks arrive in buffers and are copied into the cache together, when they are committed.

    There are as many buffers as blocks arrive between two commits: those of one message.
    """

    def __init__(self, kv: KVCache, stream: CopyStream) -> None:
        self._kv, self._stream = kv, stream
        self._free: list[Tensor] = []
        self._in_use: dict[int, Tensor] = {}
        self.block_bytes = kv.block_bytes

    def view(self, index: int) -> memoryview:
        if index not in self._in_use:
            self._in_use[index] = self._free.pop() if self._free else self._stream.buffer(self.block_bytes)
        return self._in_use[index].numpy().data

    def commit(self, indices: Sequence[int]) -> None:
        self._store([(index, self._in_use[index]) for index in indices])
        self._free.extend(self._in_use.values())
        self._in_use.clear()

    def _store(self, received: Sequence[tuple[int, Tensor]]) -> None:
        self._stream.run([(block_bytes_of(self._kv, index), buffer) for index, buffer in received])


def outgoing_blocks(kv: KVCache) -> OutgoingBlocks:
    return BlocksInPlace(kv) if kv.device.type == "cpu" else StagedOutgoing(kv, CopyStream(kv.device))


def incoming_blocks(kv: KVCache) -> IncomingBlocks:
    return BlocksInPlace(kv) if kv.device.type == "cpu" else StagedIncoming(kv, CopyStream(kv.device))


def block_bytes_of(kv: KVCache, index: int) -> Tensor:
    """One block as uint8 [block_bytes] on its device, no copy. BlockError when it is out of range."""
    return kv.block_tensor(index).view(-1).view(torch.uint8)
