"""Shared memory between workers of one host and user: the receiver maps the sender's cache, or its ring of slots."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from common.engine.kv import KVMemory, RingSource, SharedMemoryError, StagedIncoming, map_shared, ring_for
from common.engine.transfer.transports.interface import (
    Copied,
    DeviceCopySource,
    IncomingEnd,
    ReadableMemory,
    TransferCache,
    Transport,
    copy_on_device,
)
from common.engine.transfer.transports.numbered import NumberedBlocks
from common.errors import ConfigError, DiptychError
from common.wire.messages import KVBlocks, KVOffer

if TYPE_CHECKING:
    from common.engine.kv import BlockRing, IncomingBlocks, KVCache, OutgoingBlocks
    from common.engine.transfer.receiver import IncomingTransfer
    from common.engine.transfer.transports.tcp import Frames

log = logging.getLogger(__name__)
NAME = "shm"
MOST_REACHED = 2**30
"""Maximum size, in bytes, of a peer's ring that this worker's device pins: several times the usual size."""


class SharedMemoryTransport(Transport):
    """Transports `auto` and `shm`. `shm` rejects workers that cannot share memory."""

    name = NAME

    def outgoing(self, kv: TransferCache, blocks: OutgoingBlocks, frames: Frames) -> SharedBlocks | None:
        # A cache that others cannot map is copied through ring slots.
        ring = shared_ring(blocks, kv.num_blocks)
        memory = kv.shared.offer if ring is None and kv.shared is not None else None
        if memory is None and ring is None:
            if self.is_required:
                raise ConfigError("kv_transport", "shm", "auto or tcp: this system does not support shared memory")
            return None
        return SharedBlocks(frames, memory, ring, is_required=self.is_required)

    def incoming(self, kv: TransferCache, blocks: IncomingBlocks) -> SharedReads:
        return SharedReads(
            (lambda memory: RingSlotSource(blocks, memory)) if isinstance(blocks, StagedIncoming) else None
        )

    def pulls(self, kv: KVCache) -> tuple[KVOffer | None, IncomingEnd[KVMemory] | None]:
        offer = KVOffer.of(NAME, kv.shared.offer) if kv.shared is not None else None
        return offer, SharedReads() if kv.device.type == "cpu" else None


def shared_ring(blocks: OutgoingBlocks, num_blocks: int) -> BlockRing | None:
    """Create a ring for a cache that cannot be mapped; None if it can, or if shared memory is unavailable."""
    if not isinstance(blocks, RingSource):
        return None
    try:
        return ring_for(blocks, num_blocks)
    except SharedMemoryError as error:
        log.warning("KV transfers to decode workers on this host use TCP: %s", error)
        return None


class SharedBlocks(NumberedBlocks):
    """Offers the `memory` of the cache, or a `ring`."""

    transport = NAME

    def __init__(
        self,
        frames: Frames,
        memory: KVMemory | None = None,
        ring: BlockRing | None = None,
        *,
        is_required: bool = False,
    ) -> None:
        super().__init__(frames, ring, is_required=is_required)
        offered = ring.offer if ring is not None else memory
        assert offered is not None
        self._offer = KVOffer.of(NAME, offered)

    @property
    def offer(self) -> KVOffer:
        return self._offer

    @property
    def description(self) -> str:
        ring = self.ring
        return f"shared memory, through a ring of {ring.num_slots} slots" if ring is not None else "shared memory"


class SharedReads(IncomingEnd[KVMemory]):
    """Maps senders' offers. `reach` lets this worker's device copy out of a ring directly; raises DiptychError."""

    transport = NAME
    details = KVMemory

    def __init__(self, reach: Callable[[PeerMemory], DeviceCopySource] | None = None) -> None:
        self._reach = reach

    def accept(self, offer: KVMemory) -> PeerMemory:
        memory = PeerMemory(offer)
        if self._reach is not None:
            memory.copied = self._reached(memory, self._reach)
        return memory

    def _reached(self, memory: PeerMemory, reach: Callable[[PeerMemory], DeviceCopySource]) -> str:
        """Let the device access a ring, if possible. Returns how blocks are copied, for the log."""
        if not memory.is_ring:
            return ", staged in host buffers: the memory is a whole cache, too large to pin"
        if memory.offer.num_bytes > MOST_REACHED:
            return f", staged in host buffers: a ring of {memory.offer.num_bytes:,} bytes is too large to pin"
        try:
            memory.reached = reach(memory)
        except DiptychError as error:
            return f", staged in host buffers: {error}"
        return ", copied directly to the device"


class PeerMemory(ReadableMemory):
    """Reader side: another process's `SharedMemory`, mapped read-only until `close` or that process's death.

    The memory is the owner's cache, or a ring of slots, which the owner reuses after they were acknowledged. `reached`
    is set if this worker's device copies out of the ring directly.
    """

    transport = NAME
    process: int

    def __init__(self, offer: KVMemory) -> None:
        """Raises SharedMemoryError unless `offer` names a sealed memory file of this user with the same nonce."""
        if sys.platform != "linux":
            raise SharedMemoryError(f"{sys.platform} does not support sealed memory files")
        self.offer, self.copied = offer, ""
        self.reached: DeviceCopySource | None = None
        try:
            # Opened before the file: if the nonce then matches, the watched process is the one that offered it.
            self.process = os.pidfd_open(offer.pid)
        except (OSError, AttributeError) as error:
            raise SharedMemoryError(f"process {offer.pid} is not visible on this host: {error}") from error
        try:
            self._blocks = map_shared(offer)
        except (OSError, ValueError) as error:
            os.close(self.process)
            raise SharedMemoryError(f"cannot map memory file {offer.fd} of process {offer.pid}: {error}") from error
        except SharedMemoryError:
            os.close(self.process)
            raise

    @property
    def is_ring(self) -> bool:
        return self.offer.is_ring

    @property
    def description(self) -> str:
        return f"shared memory{self.copied}"

    @property
    def address(self) -> int:
        """Address of the mapping."""
        return self._blocks.ctypes.data

    def read(self, source: int, target: memoryview) -> bool:
        begin = source * (self.offer.slot_bytes or len(target))
        if self.closed or begin + len(target) > self.offer.num_bytes:
            return False
        np.copyto(np.frombuffer(target, np.uint8), self._blocks[begin : begin + len(target)])
        return True

    def copy(self, header: KVBlocks, transfer: IncomingTransfer, into: IncomingBlocks) -> Copied:
        if self.reached is not None:
            return copy_on_device(self.reached, header, transfer)
        return super().copy(header, transfer, into)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            os.close(self.process)
            if self.reached is not None:
                self.reached.close()
                self.reached = None
            self._blocks = np.empty(0, np.uint8)  # drops the last reference, which unmaps the memory


class RingSlotSource:
    """Implements `DeviceCopySource`: the device copies blocks from another worker's ring into its cache."""

    def __init__(self, blocks: StagedIncoming, memory: PeerMemory) -> None:
        """Raises RegistrationError."""
        self._blocks, self.block_bytes = blocks, blocks.block_bytes
        # Created from the address: torch has no read-only tensors and would warn.
        address, num_bytes = memory.address, memory.offer.num_bytes
        self._slot_bytes = memory.offer.slot_bytes or self.block_bytes
        self._flat = torch.frombuffer((ctypes.c_ubyte * num_bytes).from_address(address), dtype=torch.uint8)
        blocks.stream.register(self._flat, read_only=True)

    def copy(self, copies: Iterable[tuple[int, int]]) -> Iterator[int | None]:
        return self._blocks.copy_all((self._place(place), index) for place, index in copies)

    def _place(self, number: int) -> Tensor | None:
        begin = number * self._slot_bytes
        return self._flat[begin : begin + self.block_bytes] if begin + self.block_bytes <= len(self._flat) else None

    def close(self) -> None:
        self._blocks.stream.unregister(self._flat)
        self._flat = torch.empty(0, dtype=torch.uint8)
