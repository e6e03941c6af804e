"""CUDA IPC: the receiver's GPU copies blocks directly from the sender's GPU.

Each GPU computes checksums; the receiver computes them over its copy. If a checksum equals the one that the sender
computed earlier, the copy is correct, even if the sender reused the block in the meantime.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from common.engine.kv import (
    CopyStream,
    DescriptorError,
    DriverError,
    ExportedMemory,
    KVCache,
    KVDevice,
    SharedMemoryError,
    driver,
    map_exported,
)
from common.engine.transfer.transports.interface import (
    Copied,
    DeviceCopySource,
    IncomingEnd,
    OutgoingEnd,
    PreparedBlocks,
    SenderMemory,
    TransferCache,
    Transport,
    copy_on_device,
)
from common.errors import ConfigError, DiptychError
from common.wire.messages import MAX_BLOCKS_PER_FRAME, KVBlocks, KVOffer
from kernels import block_sums

if TYPE_CHECKING:
    from common.engine.kv import IncomingBlocks, OutgoingBlocks
    from common.engine.transfer.receiver import IncomingTransfer
    from common.engine.transfer.sender import OutgoingTransfer
    from common.engine.transfer.transports.tcp import Frames

NAME = "cuda-ipc"
UNSIGNED = 2**64 - 1
"""Mask: checksums are unsigned on the wire."""


class CudaIpcTransport(Transport):
    """Transport `cuda-ipc`. Where a GPU cannot access the other, blocks are sent as frames."""

    name = NAME

    def __init__(self, worker_id: str, *, is_required: bool = False, device_index: int = 0) -> None:
        super().__init__(worker_id, is_required=is_required)
        try:
            driver().check(device_index)
        except DriverError as error:
            raise ConfigError("kv_transport", "cuda-ipc", f"auto, tcp or shm: {error}") from error

    def outgoing(self, kv: TransferCache, blocks: OutgoingBlocks, frames: Frames) -> DeviceBlocks | None:
        return DeviceBlocks(frames, kv) if isinstance(kv, KVCache) and kv.exported is not None else None

    def incoming(self, kv: TransferCache, blocks: IncomingBlocks) -> DeviceReads | None:
        return DeviceReads(kv) if isinstance(kv, KVCache) else None


class DeviceSums:
    """Computes block checksums on the cache's device. Used by one thread."""

    def __init__(self, kv: KVCache, stream: CopyStream) -> None:
        """Runs the kernel once, so that no transfer waits for its compilation."""
        self._kv, self.stream = kv, stream
        with torch.inference_mode(False):  # otherwise a thread outside inference mode may not write to them
            self._host = stream.buffers(2 * MAX_BLOCKS_PER_FRAME * 8, 1)[0].view(torch.int64).view(2, -1)
            self._there = torch.zeros(2, MAX_BLOCKS_PER_FRAME, dtype=torch.int64, device=kv.device)
        stream.wait_for(lambda: self.launch([0]))

    def of(self, blocks: Sequence[int]) -> list[int]:
        """Return the checksums of at most `MAX_BLOCKS_PER_FRAME` blocks."""
        self.stream.wait_for(lambda: self.launch(blocks))
        return self.read(len(blocks))

    def launch(self, blocks: Sequence[int]) -> None:
        """Launch on the stream. Call `read` after it has completed."""
        count = len(blocks)
        self._host[0, :count] = torch.tensor(blocks, dtype=torch.int64)
        ids, sums = self._there[0, :count], self._there[1, :count]
        ids.copy_(self._host[0, :count], non_blocking=True)
        block_sums(self._kv.tensor, ids, out=sums)
        self._host[1, :count].copy_(sums, non_blocking=True)

    def read(self, count: int) -> list[int]:
        return [value & UNSIGNED for value in self._host[1, :count].tolist()]


class DeviceBlocks(OutgoingEnd):
    """Offers a cache whose blocks receivers copy with their own GPU."""

    transport = NAME
    description = "GPU to GPU (CUDA IPC)"

    def __init__(self, frames: Frames, kv: KVCache) -> None:
        """Raises SharedMemoryError unless the cache was created with `export`."""
        super().__init__(frames)
        if kv.exported is None:
            raise SharedMemoryError(f"the KV cache on {kv.device} was not created for export to other GPUs")
        self._memory: ExportedMemory = kv.exported
        self._offer = KVOffer.of(NAME, self._memory.offer)
        self._sums = DeviceSums(kv, CopyStream(kv.device))
        self._block_bytes = kv.block_bytes

    @property
    def offer(self) -> KVOffer:
        return self._offer

    def sums(self, blocks: Sequence[int]) -> list[int]:
        return self._sums.of(blocks)

    def ship(self, transfer: OutgoingTransfer, indices: range) -> PreparedBlocks:
        blocks = [transfer.blocks[index] for index in indices]
        return PreparedBlocks(indices, len(blocks) * self._block_bytes, (), blocks, self.sums(blocks))


class DeviceReads(IncomingEnd[KVDevice]):
    """Maps the caches of other GPUs for this worker's GPU."""

    transport = NAME
    details = KVDevice

    def __init__(self, kv: KVCache) -> None:
        self._kv, self._sums = kv, DeviceSums(kv, CopyStream(kv.device))

    def accept(self, offer: KVDevice) -> ImportedMemory:
        """Raises DriverError or DescriptorError."""
        opened: list[ImportedMemory] = []
        self._sums.stream.wait_for(lambda: opened.append(ImportedMemory(offer, self._kv.device.index or 0)))
        (memory,) = opened
        memory.reached = PeerDeviceSource(self._kv, self._sums, memory)
        return memory


class ImportedMemory(SenderMemory):
    """Reader side: mapped for the reader's device until `close` or the owner's death.

    `reached` copies blocks out of it with this worker's device; it must be set before the first copy.
    """

    transport = NAME
    is_ring = False
    description = "GPU to GPU (CUDA IPC)"
    process: int
    reached: DeviceCopySource

    def __init__(self, offer: KVDevice, device: int) -> None:
        """Raises DriverError, or DescriptorError if the owner does not pass its descriptor."""
        if sys.platform != "linux":
            raise DescriptorError(f"{sys.platform} does not support descriptors of GPU memory")
        self.offer = offer
        try:
            self.process = os.pidfd_open(offer.pid)
        except (OSError, AttributeError) as error:
            raise DescriptorError(f"process {offer.pid} is not visible on this host: {error}") from error
        try:
            self._map = map_exported(offer, device)
        except DiptychError:
            os.close(self.process)
            raise
        self.closed = False

    @property
    def address(self) -> int:
        """Address of the owner's first block."""
        return self._map.address

    def copy(self, header: KVBlocks, transfer: IncomingTransfer, into: IncomingBlocks) -> Copied:
        return copy_on_device(self.reached, header, transfer)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            os.close(self.process)
            self.reached.close()
            del self._map  # unmaps it


class PeerDeviceSource:
    """Implements `DeviceCopySource`: this worker's GPU copies blocks out of another worker's cache."""

    def __init__(self, kv: KVCache, sums: DeviceSums, memory: ImportedMemory) -> None:
        self._kv, self._sums, self._memory = kv, sums, memory
        self._cuda, self.block_bytes = driver(), kv.block_bytes

    def copy(self, copies: Iterable[tuple[int, int]]) -> Iterator[int | None]:
        """Copy blocks. Reads nothing once the memory is closed, which happens when its owner is found dead.

        Raises DriverError, after all launched copies have completed.
        """
        known, stream = list(copies), self._sums.stream
        most = 0 if self._memory.closed else self._memory.offer.num_bytes // self.block_bytes
        found = [(source, index) for source, index in known if source < most]
        try:
            if found:
                stream.wait_for(lambda: self._launch(found))
        except DriverError:
            stream.wait_for(lambda: None)  # wait for the copies before the rejected one
            raise
        sums = iter(self._sums.read(len(found)))
        for source, _ in known:
            yield next(sums) if source < most else None

    def close(self) -> None:
        """Nothing to do: `copy` waits for what it launches."""

    def _launch(self, copies: Sequence[tuple[int, int]]) -> None:
        stream, first = self._sums.stream.handle, self._memory.address
        for source, index in copies:
            target = self._kv.block_tensor(index).data_ptr()
            self._cuda.copy(target, first + source * self.block_bytes, self.block_bytes, stream)
        self._sums.launch([index for _, index in copies])
