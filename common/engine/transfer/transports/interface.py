"""Interface of a KV transport, an alternative to frames over TCP.

    sender                                              receiver
    Transport.outgoing -> OutgoingEnd
        .offer ──────────────────── KVOpen ───────────> Transport.incoming -> IncomingEnd
                                                            .accept -> SenderMemory, or frames are requested
        .ship  <─────────────────── KVGrant ───────────
               ──── KVBlocks: numbers and checksums ──> SenderMemory.copy
        .taken <─── KVTaken, for slots of a ring ──────
        .close                                              .close

Every worker sends and accepts frames (`tcp.Frames`), whatever its transport. A checksum verifies each block after the
copy, so a withdrawn offer, a block reused by the sender or a late write cannot corrupt the cache undetected.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

import msgspec
import zmq

from common.engine.kv import DriverError
from common.engine.transfer.frames import copy_blocks, read_block, try_send_blocks
from common.wire.messages import KVBlocks, KVOffer

if TYPE_CHECKING:
    from common.engine.kv import IncomingBlocks, KVCache, OutgoingBlocks
    from common.engine.kv.shared_memory import SharedMemory
    from common.engine.transfer.receiver import IncomingTransfer
    from common.engine.transfer.sender import OutgoingTransfer
    from common.engine.transfer.transports.tcp import Frames

Details = TypeVar("Details", bound=msgspec.Struct)


class TransferCache(Protocol):
    """KV cache of a worker, as far as all transports use it. `KVCache` is one."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def wire_bytes(self) -> int:
        """Size of the largest block on the wire."""

    @property
    def shared(self) -> SharedMemory | None:
        """Memory of the cache that other processes may map."""


Copied = tuple[list[int], int, str]
"""Indices of the blocks that are verified and in the cache, their bytes, and what was wrong with the others, or ""."""


class Transport(ABC):
    """A KV transport in one worker, for one duty. The engine's thread creates both ends before their threads start."""

    name: ClassVar[str]
    """Name in offers and in the metrics label."""

    def __init__(self, worker_id: str, *, is_required: bool = False, device_index: int = 0) -> None:
        """Check the transport's requirements before weights are loaded. Raises ConfigError if one is not met.

        `is_required`: workers that cannot use the transport are rejected instead of receiving frames. `device_index` is
        that of a GPU worker's device.
        """
        self.worker_id, self.is_required = worker_id, is_required

    @abstractmethod
    def outgoing(self, kv: TransferCache, blocks: OutgoingBlocks, frames: Frames) -> OutgoingEnd | None:
        """Create the sending end, or None if only frames are possible. Raises ConfigError."""

    @abstractmethod
    def incoming(self, kv: TransferCache, blocks: IncomingBlocks) -> IncomingEnd[Any] | None:
        """Create the receiving end, or None if only frames are accepted. Raises ConfigError."""

    def pulls(self, kv: KVCache) -> tuple[KVOffer | None, IncomingEnd[Any] | None]:
        """Return the offer to pullers of cached blocks, and the receiving end of this worker's own pulls.

        The receiving end accepts `ReadableMemory`. (None, None): pulls use frames.
        """
        return None, None


class OutgoingEnd(ABC):
    """The sending end. Used by the sender's thread only."""

    transport: ClassVar[str]
    is_required = False
    """Whether frames are never sent: the transfer waits or fails instead."""

    def __init__(self, frames: Frames) -> None:
        self.frames = frames

    @property
    @abstractmethod
    def offer(self) -> KVOffer:
        """Details that receivers need to access the blocks. Constant until `close`."""

    @property
    @abstractmethod
    def description(self) -> str:
        """Description for the log line "KV transfer to decode-0: ..."."""

    @abstractmethod
    def ship(self, transfer: OutgoingTransfer, indices: range) -> PreparedBlocks | None:
        """Prepare the first of these blocks (at least one) for a receiver that accepted the offer.

        The result may contain frames instead. Returns None if the receiver must return slots first.
        """

    def undo(self, transfer: OutgoingTransfer, prepared: PreparedBlocks) -> None:  # noqa: B027 - not every end lends places
        """Release what `ship` lent for blocks that were not sent."""

    def taken(self, transfer: OutgoingTransfer, places: Sequence[int]) -> bool:
        """Release slots that the receiver has copied. Returns False if they were not lent to its transfer.

        A receiver also reports blocks that arrived too late, whether or not they are in slots.
        """
        return True

    def end(self, transfer: OutgoingTransfer) -> None:  # noqa: B027 - not every end lends places
        """Release everything that was lent to a transfer that has ended."""

    def close(self) -> None:  # noqa: B027 - not every end owns something
        """Withdraw the offer. Nothing is sent afterwards."""


class IncomingEnd(ABC, Generic[Details]):
    """Receiving end. Used by the engine thread until the receiver's thread has started, then only by that thread."""

    transport: ClassVar[str]
    details: type[Details]
    """Type of the offers' details."""

    @abstractmethod
    def accept(self, offer: Details) -> SenderMemory:
        """Connect to a sender's offer. Raises DiptychError, with the reason, to request frames instead."""

    @property
    def poll_ms(self) -> int | None:
        """Milliseconds until `ended` must be called again; None means no deadline."""
        return None

    def ended(self) -> Iterator[ReadEnded]:
        """Yield the reads of `ReadAheadMemory` that have succeeded or failed since the last call."""
        return iter(())

    def close(self) -> None:
        """Release all resources, after all memories were closed."""


class BlockSource(Protocol):
    """Source of blocks that a receiver copies into its cache."""

    def copy(self, header: KVBlocks, transfer: IncomingTransfer, into: IncomingBlocks) -> Copied:
        """Copy and verify the blocks named in `header`. Does not raise for errors that a sender can cause."""


class SenderMemory(ABC):
    """Memory of a sender that this worker copies blocks from, valid from `IncomingEnd.accept` until `close`."""

    transport: ClassVar[str]
    process: int | None = None
    """File descriptor that becomes readable when the sender has died. The memory is closed then."""
    failed = ""
    """Reason why the memory is no longer read, or ""."""

    @property
    @abstractmethod
    def is_ring(self) -> bool:
        """Whether blocks are in slots that the sender reuses once they are returned."""

    @property
    @abstractmethod
    def description(self) -> str:
        """Description for the log line "KV transfer from prefill-0: ..."."""

    @abstractmethod
    def copy(self, header: KVBlocks, transfer: IncomingTransfer, into: IncomingBlocks) -> Copied:
        """Copy and verify the blocks named in `header`. Does not raise for errors that a sender can cause."""

    @abstractmethod
    def close(self) -> None:
        """Release the memory. Nothing is copied afterwards."""


class ReadAheadMemory(SenderMemory):
    """Memory with asynchronous reads: `begin` starts one, and `IncomingEnd.ended` yields it."""

    @abstractmethod
    def begin(self, peer: bytes, header: KVBlocks, sizes: Sequence[int]) -> str:
        """Start reading the blocks named in `header`, of these sizes in bytes. Returns the problem, or ""."""

    def copy(self, header: KVBlocks, transfer: IncomingTransfer, into: IncomingBlocks) -> Copied:
        """Reject blocks of a transfer that began after `header` was found to match no transfer."""
        return [], 0, "the message names blocks in memory that this worker cannot read"


@dataclass(slots=True, eq=False)
class ReadEnded:
    """Result of reading the blocks named in one message: `buffered`, or the `problem`."""

    peer: bytes
    header: KVBlocks
    buffered: BlockSource | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class PreparedBlocks:
    """Blocks `indices` of a transfer, ready to be sent.

    Frames have only `views`. With `sources` (block or slot numbers), only these and the checksums are sent: either
    `checksums`, or those of the `views`.
    """

    indices: range
    num_bytes: int
    views: Sequence[memoryview] = ()
    sources: Sequence[int] = ()
    checksums: Sequence[int] = ()

    def try_send(self, socket: zmq.Socket[bytes], transfer: OutgoingTransfer) -> bool:
        """Send the blocks; False if the socket's queue is full."""
        return try_send_blocks(
            socket, *transfer.key, self.indices.start, self.views, self.sources, transfer.token, self.checksums
        )


class ReadableMemory(SenderMemory):
    """Sender memory that the CPU reads block by block. Also used by pulls."""

    closed = False

    @abstractmethod
    def read(self, source: int, target: memoryview) -> bool:
        """Copy block `source`, of the size of `target`, with the GIL released. False if it does not exist."""

    def copy(self, header: KVBlocks, transfer: IncomingTransfer, into: IncomingBlocks) -> Copied:
        return copy_on_host(self.read, header, transfer, into)


class DeviceCopySource(Protocol):
    """Memory of another worker that this worker's device copies from."""

    block_bytes: int

    def copy(self, copies: Iterable[tuple[int, int]]) -> Iterator[int | None]:
        """Copy slots into blocks, given (slot, index) pairs, at the latest when a result is requested.

        Yields the checksum of each copy, or None if the slot does not exist. Raises DriverError.
        """

    def close(self) -> None:
        """End the device's access, before the memory is unmapped."""


def copy_on_host(
    read: Callable[[int, memoryview], bool], header: KVBlocks, transfer: IncomingTransfer, into: IncomingBlocks
) -> Copied:
    """Copy blocks with `read`, which works like `ReadableMemory.read`, into the views of `into`."""
    received, problem = copy_blocks(
        header,
        lambda copies: (read_block(read, place, into.view(transfer.blocks[i])) for place, i in copies),
        transfer.wants,
    )
    return committed(received, problem, transfer, into)


def copy_on_device(reached: DeviceCopySource, header: KVBlocks, transfer: IncomingTransfer) -> Copied:
    """Copy blocks directly into the cache with the device."""
    try:
        received, problem = copy_blocks(
            header,
            lambda copies: reached.copy((place, transfer.blocks[index]) for place, index in copies),
            transfer.wants,
        )
    except DriverError as error:
        received, problem = [], f"copy by the GPU failed: {error}"
    return received, len(received) * reached.block_bytes, problem


def committed(received: list[int], problem: str, transfer: IncomingTransfer, into: IncomingBlocks) -> Copied:
    """Commit verified blocks from the views of `into` to the cache."""
    blocks = [transfer.blocks[index] for index in received]
    num_bytes = sum(len(into.view(block)) for block in blocks)
    into.commit(blocks)
    return received, num_bytes, problem
