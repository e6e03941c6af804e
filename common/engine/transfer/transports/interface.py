"""The interface of a KV transport: how blocks travel other than as frames over TCP.

    sender                                              receiver
    Transport.outgoing -> OutgoingEnd
        .offer ──────────────────── KVOpen ───────────> Transport.incoming -> IncomingEnd
                                                            .accept -> SenderMemory, or frames are asked for
        .ship  <─────────────────── KVGrant ───────────
               ──── KVBlocks: numbers and checksums ──> SenderMemory.copy
        .taken <─── KVTaken, for places of a ring ─────
        .close                                              .close

Every worker sends and accepts frames (`tcp.Frames`), whatever its transport. A checksum verifies each block after it
was copied, so an offer that ends, a sender that reuses a block or a late write cannot corrupt the cache unnoticed.
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
    from common.config import WorkerConfig
    from common.engine.kv import IncomingBlocks, KVCache, OutgoingBlocks
    from common.engine.transfer.receiver import IncomingTransfer
    from common.engine.transfer.sender import OutgoingTransfer
    from common.engine.transfer.transports.tcp import Frames

Details = TypeVar("Details", bound=msgspec.Struct)

Copied = tuple[list[int], int, str]
"""Indices of the blocks that are verified and in the cache, their bytes, and what was wrong with the others, or ""."""


class Transport(ABC):
    """A KV transport in one worker, for one duty. The engine's thread creates both ends before their threads start."""

    name: ClassVar[str]
    """In offers, and as the label of the metrics."""

    def __init__(self, config: WorkerConfig, worker_id: str) -> None:
        """Check what the transport needs before weights are read. Raises ConfigError where that is missing."""
        self.config, self.worker_id = config, worker_id

    @property
    def is_required(self) -> bool:
        """Whether a worker that cannot use the transport is refused, instead of sending it frames."""
        return False

    @abstractmethod
    def outgoing(self, kv: KVCache, blocks: OutgoingBlocks, frames: Frames) -> OutgoingEnd | None:
        """Create the sending end; None where only frames are possible. Raises ConfigError."""

    @abstractmethod
    def incoming(self, kv: KVCache, blocks: IncomingBlocks) -> IncomingEnd[Any] | None:
        """Create the receiving end; None where only frames are accepted. Raises ConfigError."""

    def pulls(self, kv: KVCache) -> tuple[KVOffer | None, IncomingEnd[Any] | None]:
        """Return the offer to pullers of cached blocks, and the receiving end of this worker's own pulls.

        That end accepts `ReadableMemory`. (None, None): pulls use frames.
        """
        return None, None


class OutgoingEnd(ABC):
    """The sending end. Used by the sender's thread only."""

    transport: ClassVar[str]
    is_required = False
    """Never send frames: wait, or fail the transfer."""

    def __init__(self, frames: Frames) -> None:
        self.frames = frames

    @property
    @abstractmethod
    def offer(self) -> KVOffer:
        """Details that receivers need to reach the blocks. Constant until `close`."""

    @property
    @abstractmethod
    def in_words(self) -> str:
        """Description for the log line "KV to d-0 goes ..."."""

    @abstractmethod
    def ship(self, transfer: OutgoingTransfer, indices: range) -> Parcel | None:
        """Prepare the first of these blocks, at least one, for a receiver that accepted the offer.

        The parcel may contain frames instead. None while the receiver has to give places back first.
        """

    def undo(self, transfer: OutgoingTransfer, parcel: Parcel) -> None:  # noqa: B027 - not every end lends places
        """Take back what `ship` lent for a parcel that was not sent."""

    def taken(self, transfer: OutgoingTransfer, places: Sequence[int]) -> bool:
        """Take back places that the receiver has copied. Returns False unless they were lent to its transfer.

        A receiver also reports blocks that arrived too late, whether or not they are in places.
        """
        return True

    def end(self, transfer: OutgoingTransfer) -> None:  # noqa: B027 - not every end lends places
        """Take back everything that was lent to a transfer, which is over."""

    def close(self) -> None:  # noqa: B027 - not every end owns something
        """Withdraw the offer. Nothing is shipped afterwards."""


class IncomingEnd(ABC, Generic[Details]):
    """The receiving end. Used by one thread at a time: the engine's until the receiver's has started, then that."""

    transport: ClassVar[str]
    details: type[Details]
    """Of the offers."""

    @abstractmethod
    def accept(self, offer: Details) -> SenderMemory:
        """Connect to what a sender offers. Raises DiptychError, with the reason, to ask for frames instead."""

    @property
    def poll_ms(self) -> int | None:
        """Milliseconds until `ended` must be called again; None: no deadline."""
        return None

    def ended(self) -> Iterator[ReadEnded]:
        """Yield the reads of `ReadAheadMemory` that have succeeded or failed since the last call."""
        return iter(())

    def close(self) -> None:
        """Release all resources. All memories are closed before."""


class BlockSource(Protocol):
    """Source of blocks that a receiver copies into its cache."""

    def copy(self, header: KVBlocks, transfer: IncomingTransfer, into: IncomingBlocks) -> Copied:
        """Copy and verify the blocks that `header` names. Does not raise for what a sender can cause."""


class SenderMemory(ABC):
    """Memory of a sender that this worker copies blocks out of, from `IncomingEnd.accept` until `close`."""

    transport: ClassVar[str]
    process: int | None = None
    """A file descriptor that turns readable when the sender has died; the memory is closed then."""
    failed = ""
    """Reason why nothing is read from it any more, or ""."""

    @property
    @abstractmethod
    def is_ring(self) -> bool:
        """Whether blocks are in places that the sender reuses once they are given back."""

    @property
    @abstractmethod
    def in_words(self) -> str:
        """Description for the log line "KV from p-0 ..."."""

    @abstractmethod
    def copy(self, header: KVBlocks, transfer: IncomingTransfer, into: IncomingBlocks) -> Copied:
        """Copy and verify the blocks that `header` names. Does not raise for what a sender can cause."""

    @abstractmethod
    def close(self) -> None:
        """Release the memory. Nothing is copied afterwards."""


class ReadAheadMemory(SenderMemory):
    """Memory whose reads take a while: `begin` starts one, and `IncomingEnd.ended` yields it."""

    @abstractmethod
    def begin(self, peer: bytes, header: KVBlocks) -> str:
        """Start to read the blocks that `header` names. Returns what is wrong with them, or ""."""

    def copy(self, header: KVBlocks, transfer: IncomingTransfer, into: IncomingBlocks) -> Copied:
        """Refuse blocks of a transfer that began after `header` was seen to belong to none."""
        return [], 0, "blocks are to be copied from memory that this worker cannot read"


@dataclass(slots=True, eq=False)
class ReadEnded:
    """Result of reading the blocks that one message names: `landed`, or the `problem`."""

    peer: bytes
    header: KVBlocks
    landed: BlockSource | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Parcel:
    """The blocks `indices` of a transfer, ready to be sent.

    Frames have `views` only. With `sources`, the numbers of blocks or places, only these and the checksums travel:
    `checksums`, or those of the `views`.
    """

    indices: range
    num_bytes: int
    views: Sequence[memoryview] = ()
    sources: Sequence[int] = ()
    checksums: Sequence[int] = ()

    def try_send(self, socket: zmq.Socket[bytes], transfer: OutgoingTransfer) -> bool:
        """False when the socket's queue is full."""
        return try_send_blocks(
            socket, *transfer.key, self.indices.start, self.views, self.sources, transfer.token, self.checksums
        )


class ReadableMemory(SenderMemory):
    """Memory of a sender that the processor reads, block by block: pulls use it, too."""

    closed = False

    @abstractmethod
    def read(self, source: int, target: memoryview) -> bool:
        """Copy block number `source`, as large as `target`, without holding the interpreter. False: no such block."""

    def copy(self, header: KVBlocks, transfer: IncomingTransfer, into: IncomingBlocks) -> Copied:
        return copy_on_host(self.read, header, transfer, into)


class Reached(Protocol):
    """Memory of another worker that this worker's device copies out of itself."""

    block_bytes: int

    def copy(self, copies: Iterable[tuple[int, int]]) -> Iterator[int | None]:
        """Copy places into blocks, (place, index) pairs, at the latest when the result of one is requested.

        Yields the checksum of what was copied, None where there is no such place. Raises DriverError.
        """

    def close(self) -> None:
        """End the device's access, before the memory is unmapped."""


def copy_on_host(
    read: Callable[[int, memoryview], bool], header: KVBlocks, transfer: IncomingTransfer, into: IncomingBlocks
) -> Copied:
    """Copy blocks with `read`, as `ReadableMemory.read`, into the views of `into`."""
    received, problem = copy_blocks(
        header,
        lambda copies: (read_block(read, place, into.view(transfer.blocks[i])) for place, i in copies),
        transfer.wants,
    )
    return committed(received, problem, transfer, into)


def copy_on_device(reached: Reached, header: KVBlocks, transfer: IncomingTransfer) -> Copied:
    """Let the device copy blocks straight into the cache."""
    try:
        received, problem = copy_blocks(
            header,
            lambda copies: reached.copy((place, transfer.blocks[index]) for place, index in copies),
            transfer.wants,
        )
    except DriverError as error:
        received, problem = [], f"the GPU does not copy: {error}"
    return received, len(received) * reached.block_bytes, problem


def committed(received: list[int], problem: str, transfer: IncomingTransfer, into: IncomingBlocks) -> Copied:
    """Commit verified blocks from the views of `into` to the cache."""
    blocks = [transfer.blocks[index] for index in received]
    num_bytes = sum(len(into.view(block)) for block in blocks)
    into.commit(blocks)
    return received, num_bytes, problem
