"""Receives KV blocks into the decode worker's memory from a thread of its own, while the engine generates.

The engine owns the blocks and lends them with `expect`; once `release` has returned, this thread writes to none of
them. It holds no lock while it reads, verifies and copies: only a `release` of the transfer whose block it writes at
that moment waits, until that block is written. It reads frames that match no transfer (unknown request, old attempt,
token of another grant, block received before) off the socket and drops them, so a late or forged frame does no harm. It
copies the blocks of a prefill worker whose offer it accepted out of that memory; places of a ring are given back once
their blocks are verified. Frames of 8-bit numbers arrive in buffers, from which they are dequantised.
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
"""Messages of one sender that ZeroMQ keeps until they are read; the sender queues `SEND_HWM` more at most."""
POLL_MS = 1000
"""How often the thread wakes where nothing happens."""
WRITE_S = 30.0
"""How long a block that has come may take to be written: it is a copy of memory."""


@dataclass(slots=True, eq=False)
class IncomingTransfer:
    """The prompt's blocks from `first_block` on are to come into `blocks[first_block ..]`; those before have their KV.

    A block is received once its frame arrived, or it was copied from `memory`, and its checksum matched. A second frame
    for it is ignored. `memory` is the prefill worker's, if this worker can read it. In a hand-over `blocks` has room
    for more blocks than come in the end, as `done` says. Frames must carry the secret `token`. They hold 8-bit numbers
    if the transfer is `quantised`. Once it is `released` no further block is written. `num_bytes` arrived or were
    copied; `arrivals` has when each message was read, and its bytes. Times are engine clock, in seconds.
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
        """The name of the KV transport that blocks come by."""
        return self.memory.transport if self.memory is not None else "tcp"

    @property
    def reads_ahead(self) -> bool:
        """Whether the blocks of several messages are read at once, so that `busy_s` is not what they took."""
        return isinstance(self.memory, ReadAheadMemory)

    @property
    def num_blocks(self) -> int:
        """Blocks of the whole prompt: in a hand-over an upper bound until `done`."""
        return self.done.num_blocks if self.done and self.done.num_blocks else len(self.blocks)

    @property
    def num_missing(self) -> int:
        return max(0, self.num_blocks - self.first_block) - len(self.received)

    @property
    def complete(self) -> bool:
        return self.done is not None and self.num_missing == 0

    @property
    def num_prefix_received(self) -> int:
        """Blocks from the start of the prompt that have their KV, without a gap."""
        index = self.first_block
        while index in self.received:
            index += 1
        return index

    def bytes_since(self, at: float) -> int:
        """Bytes that arrived after this time."""
        return sum(num_bytes for arrived_at, num_bytes in self.arrivals if arrived_at > at)

    def wants(self, index: int) -> bool:
        """Whether a frame for block `index` may be written."""
        is_lent = self.first_block <= index < len(self.blocks) and not self.released
        return is_lent and index not in self.received


@dataclass(frozen=True, slots=True)
class TransferOpened:
    """A prefill worker announced KV. Answers go to `peer`; `received_at` is by this worker's clock.

    `memory` is the prefill worker's, if this worker can read it.
    """

    peer: bytes
    message: KVOpen
    received_at: float
    memory: SenderMemory | None = None


@dataclass(frozen=True, slots=True)
class TransferCompleted:
    """Every block has arrived and is verified, and the prefill worker's hold has ended."""

    transfer: IncomingTransfer


@dataclass(frozen=True, slots=True)
class TransferFailed:
    """The transfer is over. `by_peer`: `peer` says that it gave up. The transfer may be another peer's.

    `phase` is that in which the peer's request failed for good, or "".
    """

    request_id: str
    attempt: int
    reason: str
    by_peer: bool
    peer: bytes = b""
    phase: str = ""


class KVListener:
    """The bound socket of a receiver: its address is announced before the model, and so the receiver, exists."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], host: str, port: int, curve: Curve | None = None
    ) -> None:
        """Raises zmq.ZMQError for a taken port."""
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
    """`expect`, `release` and `send` are called by the engine's thread only; `on_event` is called on the receiver's."""

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
        """`listener` and `transports` are closed with the receiver.

        Blocks arrive in the views of `blocks`, or of `quantised` where frames hold 8-bit numbers, and are committed
        once they are verified, before they count as received. `quantised` None: such frames are not accepted.
        """
        self._socket, self.address = listener.socket, listener.address
        self._blocks, self._quantised, self._on_event = blocks, quantised, on_event
        self._transfers: dict[tuple[str, int], IncomingTransfer] = {}
        self._writing: IncomingTransfer | None = None
        self._lock = threading.Condition()  # of `_transfers` and `_writing`
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
        """End the thread and close its sockets. Call once, from the engine's thread or after it ended."""
        self._outbox.put(None)
        self._thread.join(timeout_s)
        self._outbox.close_sending()

    def close(self) -> None:
        """Close the sockets of a receiver whose thread was never started."""
        self._outbox.close_sending()
        self._outbox.close()
        self._socket.close()

    def send(self, peer: bytes, message: Message) -> None:
        """Answer a prefill worker."""
        self._outbox.put((peer, message))

    def expect(self, transfer: IncomingTransfer) -> None:
        """Lend the transfer's blocks. Call before the grant is sent."""
        with self._lock:
            self._transfers[transfer.key] = transfer

    def release(self, request_id: str, attempt: int) -> IncomingTransfer | None:
        """Take the blocks back: no frame is written to them once this has returned.

        Raises BlockError if the receiver's thread does not leave them.
        """
        with self._lock:
            if (transfer := self._transfers.pop((request_id, attempt), None)) is None:
                return None
            transfer.released = True
            if not self._lock.wait_for(lambda: self._writing is not transfer, WRITE_S):
                raise BlockError(f"transfer {request_id}/{attempt}: a block is being written for {WRITE_S:g} s")
            return transfer

    def touch(self, request_id: str, attempt: int, now: float) -> None:
        """The prefill worker is alive: its silence counts from `now`."""
        with self._lock:
            if (transfer := self._transfers.get((request_id, attempt))) is not None:
                transfer.last_progress = now

    def stalled(self, before: float) -> list[IncomingTransfer]:
        """Transfers without any progress since `before`."""
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
                        self._land(read)
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
        # ROUTER drops messages to a peer that is gone. Its lease ends by itself.
        self._socket.send_multipart([peer, encode(message)], zmq.NOBLOCK)

    def _receive(self) -> None:
        """Process one message. Every part of it is consumed, in any case."""
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
            self._drop(f"{type(message).__name__} with frames behind it")
            return
        match message:
            case KVOpen():
                self._open(peer, message)
            case KVDone():
                self._finish(message)
            case KVFailed(request_id=request_id, attempt=attempt, reason=reason, phase=phase):
                self._on_event(TransferFailed(request_id, attempt, reason, by_peer=True, peer=peer, phase=phase))
            case _:
                self._drop(f"{type(message).__name__} is not for a decode worker's KV socket")

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
        """Start to read the blocks of a message, if their memory reads ahead. False: it does not."""
        with self._lock:
            transfer = self._transfer_of(header)
        if transfer is None or not isinstance(transfer.memory, ReadAheadMemory):
            return False
        if extra := discard_rest(self._socket):
            problem = f"{extra} frames behind blocks that are to be read"
        else:
            problem = transfer.memory.begin(peer, header)
        if problem:
            self._fail(transfer, problem)
        return True

    def _land(self, read: ReadEnded) -> None:
        """Take the blocks of a read that has ended, if their transfer still wants them."""
        if read.landed is not None:
            self._write(read.peer, read.header, read.landed)
            return
        with self._lock:
            transfer = self._transfer_of(read.header)
        if transfer is not None:
            self._fail(transfer, read.problem)

    def _write(self, peer: bytes, header: KVBlocks, landed: BlockSource | None = None) -> None:
        """Write the blocks of a message: its frames, those that it names in a memory, or those that `landed`."""
        with self._lock:
            self._writing = transfer = self._transfer_of(header)
        if transfer is None:
            discard_rest(self._socket)
            self._drop_late(f"{len(header.checksums)} blocks", header)
            self._give_back(peer, header)
            return
        began = time.monotonic()
        try:
            num_bytes, problem = self._write_blocks(transfer, header, landed)
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
            self._give_back(peer, header)

    def _give_back(self, peer: bytes, header: KVBlocks) -> None:
        """The blocks of this message are not read any more, or again: their sender may fill the places."""
        if header.sources:
            self._answer(peer, KVTaken(request_id=header.request_id, attempt=header.attempt, places=header.sources))

    def _write_blocks(
        self, transfer: IncomingTransfer, header: KVBlocks, landed: BlockSource | None
    ) -> tuple[int, str]:
        """Write the blocks of a message into the cache: the bytes of those that are intact, and what was wrong."""
        into = self._quantised if transfer.quantised and self._quantised is not None else self._blocks
        source = landed or transfer.memory
        received: list[int] = []
        num_bytes, problem = 0, ""
        if not header.sources:
            received, problem = receive_blocks(
                self._socket,
                header,
                lambda index: into.view(transfer.blocks[index]) if transfer.wants(index) else None,
            )
            received, num_bytes, problem = committed(received, problem, transfer, into)
        elif landed is None and (extra := discard_rest(self._socket)):
            problem = f"{extra} frames behind blocks that are to be copied"
        elif source is None:
            problem = "blocks are to be copied from memory that this worker cannot read"
        else:
            received, num_bytes, problem = source.copy(header, transfer, into)
        transfer.received.update(received)
        transfer.num_bytes += num_bytes
        self.num_bytes += num_bytes
        return num_bytes, problem

    def _transfer_of(self, message: KVBlocks | KVDone) -> IncomingTransfer | None:
        """The transfer that a message belongs to, if the message has its token."""
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
            self._drop_late("the end", done)
        elif not transfer.first_block <= transfer.num_blocks <= len(transfer.blocks):
            self._fail(
                transfer, f"{transfer.num_blocks} blocks from {transfer.first_block} on, of {len(transfer.blocks)}"
            )
        elif transfer.complete:
            self._complete(transfer)

    def _complete(self, transfer: IncomingTransfer) -> None:
        with self._lock:
            if self._transfers.pop(transfer.key, None) is None:
                return  # released while the last frame was on its way
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
        """Drop frames of a transfer that was aborted meanwhile, without a warning."""
        self._num_late += 1
        log.debug("dropped %s of %s/%d: not expected, or not any more", what, message.request_id, message.attempt)

    def _drop(self, why: str) -> None:
        self._drops.add(why, time.monotonic())
