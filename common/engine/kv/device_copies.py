"""Blocks that go from one GPU's cache to another's without a byte in host memory, with checksums by the GPUs.

A receiver copies a block, and takes the checksum of its copy: if it is the one that the sender took before, no byte was
another's, whatever happens to the sender's block meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from common.engine.kv.cache import KVCache
from common.engine.kv.copy_stream import CopyStream
from common.engine.kv.cuda_driver import DriverError, driver
from common.engine.kv.device_memory import ExportedMemory, ImportedMemory
from common.engine.kv.shared_memory import NotShared
from common.wire.messages import MAX_BLOCKS_PER_FRAME, KVDevice
from kernels import block_sums

UNSIGNED = 2**64 - 1
"""A mask: checksums travel without a sign."""


class DeviceSums:
    """Checksums of a cache's blocks by its device. Used by one thread."""

    def __init__(self, kv: KVCache, stream: CopyStream) -> None:
        """Runs the kernel once, so that no transfer waits for it to be compiled."""
        self._kv, self.stream = kv, stream
        with torch.inference_mode(False):  # else a thread without that mode might not write to them
            self._host = stream.buffers(2 * MAX_BLOCKS_PER_FRAME * 8, 1)[0].view(torch.int64).view(2, -1)
            self._there = torch.zeros(2, MAX_BLOCKS_PER_FRAME, dtype=torch.int64, device=kv.device)
        stream.wait_for(lambda: self.launch([0]))

    def of(self, blocks: Sequence[int]) -> list[int]:
        """At most `MAX_BLOCKS_PER_FRAME` of them."""
        self.stream.wait_for(lambda: self.launch(blocks))
        return self.read(len(blocks))

    def launch(self, blocks: Sequence[int]) -> None:
        """On the stream; `read` when it has ended."""
        count = len(blocks)
        self._host[0, :count] = torch.tensor(blocks, dtype=torch.int64)
        ids, sums = self._there[0, :count], self._there[1, :count]
        ids.copy_(self._host[0, :count], non_blocking=True)
        block_sums(self._kv.tensor, ids, out=sums)
        self._host[1, :count].copy_(sums, non_blocking=True)

    def read(self, count: int) -> list[int]:
        return [value & UNSIGNED for value in self._host[1, :count].tolist()]


class OfferedDevice:
    """A cache whose blocks receivers copy with their own GPU. Used by the sender's thread."""

    def __init__(self, kv: KVCache) -> None:
        """Raises NotShared unless the cache was made to be exported."""
        if kv.exported is None:
            raise NotShared(f"the KV cache on {kv.device} was not made to be read by other GPUs")
        self._memory: ExportedMemory = kv.exported
        self._sums = DeviceSums(kv, CopyStream(kv.device))
        self.block_bytes = kv.block_bytes

    @property
    def offer(self) -> KVDevice:
        return self._memory.offer

    def sums(self, blocks: Sequence[int]) -> list[int]:
        return self._sums.of(blocks)


class DeviceReads:
    """Opens the caches of other GPUs for the receiver of this worker's. Used by the receiver's thread."""

    def __init__(self, kv: KVCache) -> None:
        self._kv, self._sums = kv, DeviceSums(kv, CopyStream(kv.device))

    def open(self, offer: KVDevice) -> ImportedMemory:
        """Raises DriverError or NotGiven."""
        opened: list[ImportedMemory] = []
        self._sums.stream.wait_for(lambda: opened.append(ImportedMemory(offer, self._kv.device.index or 0)))
        (memory,) = opened
        memory.reached = ReachedDevice(self._kv, self._sums, memory)
        return memory


class ReachedDevice:
    """Implements `Reached`: this worker's GPU copies blocks out of another one's cache."""

    def __init__(self, kv: KVCache, sums: DeviceSums, memory: ImportedMemory) -> None:
        self._kv, self._sums, self._memory = kv, sums, memory
        self._cuda, self.block_bytes = driver(), kv.block_bytes

    def copy(self, copies: Iterable[tuple[int, int]]) -> Iterator[int | None]:
        """Nothing is read once the memory is closed, as it is when its owner was seen to be dead.

        Raises DriverError, when nothing writes to the blocks any more.
        """
        known, stream = list(copies), self._sums.stream
        most = 0 if self._memory.closed else self._memory.offer.num_bytes // self.block_bytes
        found = [(source, index) for source, index in known if source < most]
        try:
            if found:
                stream.wait_for(lambda: self._launch(found))
        except DriverError:
            stream.wait_for(lambda: None)  # for the copies before the one that was refused
            raise
        sums = iter(self._sums.read(len(found)))
        for source, _ in known:
            yield next(sums) if source < most else None

    def close(self) -> None:
        """Nothing is in flight: `copy` waits for what it launches."""

    def _launch(self, copies: Sequence[tuple[int, int]]) -> None:
        stream, first = self._sums.stream.handle, self._memory.address
        for source, index in copies:
            target = self._kv.block_tensor(index).data_ptr()
            self._cuda.copy(target, first + source * self.block_bytes, self.block_bytes, stream)
        self._sums.launch([index for _, index in copies])
