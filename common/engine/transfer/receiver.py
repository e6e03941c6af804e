"""Receives KV blocks into the decode worker's memory, on a dedicated thread, while the engine generates.

The engine owns the blocks and lends them with `expect`. After `release` returned, this thread writes to none of them.
It holds no lock while it reads, verifies and copies. A `release` waits only if a block of the same transfer is being
written at that moment. Frames that match no transfer (unknown request, old attempt, token of another grant, block
already received) are read off the socket and dropped, so late or forged frames do no harm. Blocks of a prefill worker
whose offer was accepted are copied out of its memory. Ring slots are returned once their blocks are verified. Quantised
frames arrive in buffers and are dequantised from there.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import zmq

from common.engine.transfer.frames import MAX_FRAME_BYTES, discard_rest, receive_blocks
from common.engine.transfer.mailbox import Mailbox
from common.engine.transfer.peer_memories import PeerMemories
from common.engine.transfer.transports.interface import (
    BlockSource,
    IncomingEnd,
    ReadAheadMemory,
    ReadEnded,
    SenderMemory,
    committed,
)
from common.errors import BlockError, WireError
from common.wire import Curve, DropLog, bind, decode, encode
from common.wire.messages import KVAck, KVBlocks, KVDone, KVFailed, KVOpen, KVTaken, Message

if TYPE_CHECKING:
    from common.engine.kv import IncomingBlocks

log = logging.getLogger(__name__)
RECEIVE_HWM = 64
"""Messages that ZeroMQ queues per sender until they are read, in addition to the sender's `SEND_HWM`."""
POLL_MS = 1000
"""Poll timeout of an idle thread, in milliseconds."""
WRITE_S = 30.0
"""Timeout, in seconds, for writing a received block, which is a memory copy."""


@dataclass(slots=True, eq=False)
class IncomingTransfer:
    """Transfer of a prompt's blocks, from `first_block`, into `blocks[first_block ..]`. Earlier blocks are cached.

    A block counts as received once its frame arrived, or it was copied from `memory`, and its checksum matched. Further
    frames for it are ignored. `memory` is the prefill worker's memory, if readable. In a hand-over, `blocks` may be
    longer than the number of blocks that `done` finally reports. Frames must carry the secret `token`. Frames are 8-bit
    integers if `quantised`. Once `released`, no block is written. `num_bytes` were received or copied; `arrivals` has
    the time and bytes of each message. Times are monotonic, in seconds.
    """

    request_id: str
    attempt: int
    peer: bytes
    blocks: Sequence[int]
    first_block: int
    granted_at: float
    last_progress: float
    received: set[int] = field(default_factory=set)
    done: KVDone | None = None
    done_at: float = 0.0
    last_block_at: float = 0.0
    busy_s: float = 0.0
    memory: SenderMemory | None = None
    token: int = 0
    quantised: bool = False
    released: bool = False
    num_bytes: int = 0
    arrivals: list[tuple[float, int]] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, int]:
        return (self.request_id, self.attempt)

    @property
    def transport(self) -> str:
        """Name of the KV transport in use."""
        return self.memory.transport if self.memory is not None else "tcp"

    @property
    def reads_ahead(self) -> bool:
        """Whether blocks of several messages are read concurrently, so that `busy_s` is not their duration."""
        return isinstance(self.memory, ReadAheadMemory)

    @property
    def num_blocks(self) -> int:
        """Blocks of the whole prompt; an upper bound until `done` in a hand-over."""
        return self.done.num_blocks if self.done and self.done.num_blocks else len(self.blocks)

    @property
    def num_missing(self) -> int:
        return max(0, self.num_blocks - self.first_block) - len(self.received)

    @property
    def complete(self) -> bool:
        return self.done is not None and self.num_missing == 0

    @property
    def num_prefix_received(self) -> int:
        """Number of leading blocks of the prompt that have their KV, without a gap."""
        index = self.first_block
        while index in self.received:
            index += 1
        return index

    def bytes_since(self, at: float) -> int:
        """Return the bytes that arrived after this time."""
        return sum(num_bytes for arrived_at, num_bytes in self.arrivals if arrived_at > at)

    def wants(self, index: int) -> bool:
        """Return whether a frame for block `index` may be written."""
        is_lent = self.first_block <= index < len(self.blocks) and not self.released
        return is_lent and index not in self.received


@dataclass(frozen=True, slots=True)
class TransferOpened:
    """A prefill worker announced KV. Replies go to `peer`; `received_at` is in this worker's clock.

    `memory` is the prefill worker's memory, if readable.
    """

    peer: bytes
    message: KVOpen
    received_at: float
    memory: SenderMemory | None = None


@dataclass(frozen=True, slots=True)
class TransferCompleted:
    """All blocks were received and verified, and the prefill worker may release its blocks."""

    transfer: IncomingTransfer


@dataclass(frozen=True, slots=True)
class TransferFailed:
    """The transfer has failed. `by_peer`: `peer` reported the failure; it may not be the transfer's peer.

    `phase` is the phase in which the peer's request failed permanently, or "".
    """

    request_id: str
    attempt: int
    reason: str
    by_peer: bool
    peer: bytes = b""
    phase: str = ""


class KVListener:
    """Bound socket of a receiver. Its address is announced before the model is loaded and the receiver exists."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], host: str, port: int, curve: Curve | None = None
    ) -> None:
        """Raises zmq.ZMQError if the port is in use."""
        self.socket = context.socket(zmq.ROUTER)
        self.socket.set(zmq.LINGER, 0)
        self.socket.set(zmq.RCVHWM, RECEIVE_HWM)
        self.socket.set(zmq.SNDHWM, 100_000)
        self.socket.set(zmq.RCVBUF, 4 * 1024 * 1024)
        self.socket.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        try:
            self.address = bind(self.socket, host, port, curve)
        except zmq.ZMQError:
            self.socket.close()
            raise

    def close(self) -> None:
        self.socket.close()


class KVReceiver:
    """Receives KV. Only the engine thread calls `expect`, `release` and `send`; `on_event` runs on the receiver's."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        listener: KVListener,
        blocks: IncomingBlocks,
        on_event: Callable[[TransferOpened | TransferCompleted | TransferFailed], None],
        *,
        transports: Sequence[IncomingEnd[Any]] = (),
        quantised: IncomingBlocks | None = None,
    ) -> None:
        """The receiver closes `listener` and `transports`.

        Blocks arrive in the views of `blocks`, or of `quantised` for 8-bit frames, and are committed after
        verification, before they count as received. If `quantised` is None, such frames are not accepted.
        """
        self._socket, self.address = listener.socket, listener.address
        self._blocks, self._quantised, self._on_event = blocks, quantised, on_event
        self._transfers: dict[tuple[str, int], IncomingTransfer] = {}
        self._writing: IncomingTransfer | None = None
        self._lock = threading.Condition()  # protects `_transfers` and `_writing`
        self._transports = tuple(transports)
        self._memories = PeerMemories(transports)
        self._outbox: Mailbox[tuple[bytes, Message] | None] = Mailbox(context)
        self.num_bytes = 0
        self._drops = DropLog(log, "a KV frame")
        self._num_late = 0
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name="kv-receiver", daemon=True)

    @property
    def num_dropped_frames(self) -> int:
        return self._drops.num_dropped + self._num_late

    @property
    def accepts_quantised(self) -> bool:
        return self._quantised is not None

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 2.0) -> None:
        """Stop the thread and close its sockets. Call once, from the engine thread or after it ended."""
        self._outbox.put(None)
        self._thread.join(timeout_s)
        self._outbox.close_sending()

    def close(self) -> None:
        """Close the sockets of a receiver whose thread was never started."""
        self._outbox.close_sending()
        self._outbox.close()
        self._socket.close()

    def send(self, peer: bytes, message: Message) -> None:
        """Reply to a prefill worker."""
        self._outbox.put((peer, message))

    def expect(self, transfer: IncomingTransfer) -> None:
        """Lend the transfer's blocks. Call it before sending the grant."""
        with self._lock:
            self._transfers[transfer.key] = transfer

    def release(self, request_id: str, attempt: int) -> IncomingTransfer | None:
        """End the transfer. No frame is written to its blocks after this returns.

        Raises BlockError if the receiver's thread does not finish writing a block within the timeout.
        """
        with self._lock:
            if (transfer := self._transfers.pop((request_id, attempt), None)) is None:
                return None
            transfer.released = True
            if not self._lock.wait_for(lambda: self._writing is not transfer, WRITE_S):
                raise BlockError(f"transfer {request_id}/{attempt}: writing a block took longer than {WRITE_S:g} s")
            return transfer

    def touch(self, request_id: str, attempt: int, now: float) -> None:
        """Restart the transfer's silence timer: the prefill worker is alive."""
        with self._lock:
            if (transfer := self._transfers.get((request_id, attempt))) is not None:
                transfer.last_progress = now

    def stalled(self, before: float) -> list[IncomingTransfer]:
        """Return transfers without progress since `before`."""
        with self._lock:
            return [transfer for transfer in self._transfers.values() if transfer.last_progress < before]

    def _main(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._outbox.socket, zmq.POLLIN)
        self._memories.watch(poller)
        try:
            while True:
                ready = dict(poller.poll(self._poll_ms()))
                self._memories.drop_dead(ready)
                if not self._flush():
                    break
                if self._socket in ready:
                    self._receive()
                for transport in self._transports:
                    for read in transport.ended():
                        self._finish_read(read)
                self._drops.flush(time.monotonic())
        except BaseException as error:
            log.exception("KV receiver died")
            self.failure = error
        finally:
            self._memories.close()
            for transport in self._transports:
                transport.close()
            self._socket.close()
            self._outbox.close()

    def _poll_ms(self) -> int:
        return min((each.poll_ms for each in self._transports if each.poll_ms is not None), default=POLL_MS)

    def _flush(self) -> bool:
        for item in self._outbox.take():
            if item is None:
                return False
            self._answer(*item)
        return True

    def _answer(self, peer: bytes, message: Message) -> None:
        # ROUTER drops messages to a disconnected peer, whose lease expires.
        self._socket.send_multipart([peer, encode(message)], zmq.NOBLOCK)

    def _receive(self) -> None:
        """Process one message. All of its parts are always consumed."""
        peer = self._socket.recv()
        if not self._socket.getsockopt(zmq.RCVMORE):
            self._drop("a frame without a message")
            return
        try:
            message = decode(self._socket.recv())
        except WireError as error:
            discard_rest(self._socket)
            self._drop(str(error))
            return
        if isinstance(message, KVBlocks):
            self._receive_blocks(peer, message)
            return
        if discard_rest(self._socket):
            self._drop(f"unexpected frames after {type(message).__name__}")
            return
        match message:
            case KVOpen():
                self._open(peer, message)
            case KVDone():
                self._finish(message)
            case KVFailed(request_id=request_id, attempt=attempt, reason=reason, phase=phase):
                self._on_event(TransferFailed(request_id, attempt, reason, by_peer=True, peer=peer, phase=phase))
            case _:
                self._drop(f"unexpected {type(message).__name__}")

    def _open(self, peer: bytes, message: KVOpen) -> None:
        received_at = time.monotonic()
        try:
            memory = self._memories.of(message)
        except WireError as error:
            self._drop(str(error))
            return
        self._on_event(TransferOpened(peer, message, received_at, memory))

    def _receive_blocks(self, peer: bytes, header: KVBlocks) -> None:
        if not header.sources or not self._begin_read(peer, header):
            self._write(peer, header)

    def _begin_read(self, peer: bytes, header: KVBlocks) -> bool:
        """Start reading the blocks of a message if their memory reads ahead. Returns False otherwise."""
        with self._lock:
            transfer = self._transfer_of(header)
        if transfer is None or not isinstance(transfer.memory, ReadAheadMemory):
            return False
        first, stop = header.first_block, header.first_block + len(header.sources)
        if extra := discard_rest(self._socket):
            problem = f"{extra} unexpected frames: the message names blocks in memory"
        elif first < transfer.first_block or stop > len(transfer.blocks):
            problem = f"message names blocks {first} to {stop} of {transfer.first_block} to {len(transfer.blocks)}"
        else:
            sizes = [self._blocks.num_bytes(block) for block in transfer.blocks[first:stop]]
            problem = transfer.memory.begin(peer, header, sizes)
        if problem:
            self._fail(transfer, problem)
        return True

    def _finish_read(self, read: ReadEnded) -> None:
        """Write the blocks of a completed read if their transfer still wants them."""
        if read.buffered is not None:
            self._write(read.peer, read.header, read.buffered)
            return
        with self._lock:
            transfer = self._transfer_of(read.header)
        if transfer is not None:
            self._fail(transfer, read.problem)

    def _write(self, peer: bytes, header: KVBlocks, buffered: BlockSource | None = None) -> None:
        """Write the blocks of a message: from its frames, from the memory it names, or from `buffered`."""
        with self._lock:
            self._writing = transfer = self._transfer_of(header)
        if transfer is None:
            discard_rest(self._socket)
            self._drop_late(f"{len(header.checksums)} blocks", header)
            self._return_slots(peer, header)
            return
        began = time.monotonic()
        try:
            num_bytes, problem = self._write_blocks(transfer, header, buffered)
            transfer.last_progress = now = time.monotonic()
            transfer.busy_s += now - began
            if num_bytes:
                transfer.last_block_at = now
                transfer.arrivals.append((now, num_bytes))
        finally:
            with self._lock:
                self._writing = None
                self._lock.notify_all()
        if problem:
            self._fail(transfer, problem)
        elif transfer.complete:
            self._complete(transfer)
        elif transfer.memory is not None and transfer.memory.is_ring:
            self._return_slots(peer, header)

    def _return_slots(self, peer: bytes, header: KVBlocks) -> None:
        """Notify the sender that it may reuse the slots of this message."""
        if header.sources:
            self._answer(peer, KVTaken(request_id=header.request_id, attempt=header.attempt, places=header.sources))

    def _write_blocks(
        self, transfer: IncomingTransfer, header: KVBlocks, buffered: BlockSource | None
    ) -> tuple[int, str]:
        """Write a message's blocks into the cache. Returns the bytes written and the problem, or ""."""
        into = self._quantised if transfer.quantised and self._quantised is not None else self._blocks
        source = buffered or transfer.memory
        received: list[int] = []
        num_bytes, problem = 0, ""
        if not header.sources:
            received, problem = receive_blocks(
                self._socket,
                header,
                lambda index: into.view(transfer.blocks[index]) if transfer.wants(index) else None,
            )
            received, num_bytes, problem = committed(received, problem, transfer, into)
        elif buffered is None and (extra := discard_rest(self._socket)):
            problem = f"{extra} unexpected frames: the message names blocks in memory"
        elif source is None:
            problem = "the message names blocks in memory that this worker cannot read"
        else:
            received, num_bytes, problem = source.copy(header, transfer, into)
        transfer.received.update(received)
        transfer.num_bytes += num_bytes
        self.num_bytes += num_bytes
        return num_bytes, problem

    def _transfer_of(self, message: KVBlocks | KVDone) -> IncomingTransfer | None:
        """Return the transfer that a message belongs to, if the token matches."""
        transfer = self._transfers.get((message.request_id, message.attempt))
        return transfer if transfer is not None and transfer.token == message.token else None

    def _finish(self, done: KVDone) -> None:
        with self._lock:
            transfer = self._transfer_of(done)
            if transfer is None or transfer.done is not None:
                transfer = None
            else:
                transfer.done = done
                transfer.done_at = transfer.last_progress = time.monotonic()
        if transfer is None:
            self._drop_late("KVDone", done)
        elif not transfer.first_block <= transfer.num_blocks <= len(transfer.blocks):
            self._fail(
                transfer,
                f"invalid number of blocks {transfer.num_blocks}: "
                f"must be {transfer.first_block} to {len(transfer.blocks)}",
            )
        elif transfer.complete:
            self._complete(transfer)

    def _complete(self, transfer: IncomingTransfer) -> None:
        with self._lock:
            if self._transfers.pop(transfer.key, None) is None:
                return  # released before the last frame was processed
        self._answer(transfer.peer, KVAck(request_id=transfer.request_id, attempt=transfer.attempt))
        self._on_event(TransferCompleted(transfer))

    def _fail(self, transfer: IncomingTransfer, reason: str) -> None:
        self._drop(f"transfer {transfer.request_id}/{transfer.attempt} from a prefill worker: {reason}")
        if self.release(*transfer.key) is not None:
            self._answer(
                transfer.peer, KVFailed(request_id=transfer.request_id, attempt=transfer.attempt, reason=reason)
            )
            self._on_event(TransferFailed(transfer.request_id, transfer.attempt, reason, by_peer=False))

    def _drop_late(self, what: str, message: KVBlocks | KVDone) -> None:
        """Count frames of an aborted transfer as dropped, without a warning."""
        self._num_late += 1
        log.debug("dropped %s of transfer %s/%d: no longer expected", what, message.request_id, message.attempt)

    def _drop(self, why: str) -> None:
        self._drops.add(why, time.monotonic())
