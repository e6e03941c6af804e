"""Receives KV blocks into the decode worker's memory from a thread of its own, while the engine generates.

The engine owns the blocks and lends them with `expect`; once `release` has returned, this thread writes to none of
them. It holds no lock while it reads, verifies and copies: only a `release` of the transfer whose block it writes at
that moment waits, until that block is written. It reads frames that match no transfer (unknown request, old attempt,
token of another grant, block received before) off the socket and drops them, so a late or forged frame does no harm. It
copies the blocks of a prefill worker whose memory it can read from there; places of a ring it gives back once their
blocks are verified. Frames of 8-bit numbers arrive in buffers, from which they are dequantised.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import zmq

from common.engine.kv import DriverError, ImportedMemory, PeerMemory, Reached
from common.engine.transfer.frames import MAX_FRAME_BYTES, copy_blocks, discard_rest, read_block, receive_blocks
from common.engine.transfer.incoming import (
    IncomingTransfer,
    TransferCompleted,
    TransferFailed,
    TransferOpened,
)
from common.engine.transfer.mailbox import Mailbox
from common.engine.transfer.peer_memories import PeerMemories
from common.engine.transfer.remote_memory import LandedBlocks, RemoteMemory
from common.errors import BlockError, WireError
from common.wire import Curve, DropLog, bind, decode, encode
from common.wire.messages import KVAck, KVBlocks, KVDevice, KVDone, KVFailed, KVOpen, KVTaken, Message

if TYPE_CHECKING:
    from common.engine.kv import IncomingBlocks
    from common.engine.transfer.remote_reads import RemoteRead, RemoteReads

log = logging.getLogger(__name__)
RECEIVE_HWM = 64
"""Messages of one sender that ZeroMQ keeps until they are read; the sender queues `SEND_HWM` more at most."""
POLL_MS = 1000
"""How often the thread wakes where nothing happens."""
WRITE_S = 30.0
"""How long a block that has come may take to be written: it is a copy of memory."""


class KVReceiver:
    """`expect`, `release` and `send` are called by the engine's thread only; `on_event` is called on the receiver's."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        host: str,
        port: int,
        block_view: Callable[[int], memoryview],
        on_event: Callable[[TransferOpened | TransferCompleted | TransferFailed], None],
        *,
        share: bool = True,
        commit: Callable[[Sequence[int]], None] = lambda blocks: None,
        curve: Curve | None = None,
    ) -> None:
        """`share`: read the memory of prefill workers that offer it, where that works.

        `commit(blocks)` is called once the bytes of these blocks are in their views and verified, before they count as
        received.
        """
        self._socket = context.socket(zmq.ROUTER)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.RCVHWM, RECEIVE_HWM)
        self._socket.set(zmq.SNDHWM, 100_000)
        self._socket.set(zmq.RCVBUF, 4 * 1024 * 1024)
        self._socket.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self.address = bind(self._socket, host, port, curve)
        self._block_view, self._on_event, self._commit = block_view, on_event, commit
        self._quantised: IncomingBlocks | None = None
        self._reads: RemoteReads | None = None
        self._transfers: dict[tuple[str, int], IncomingTransfer] = {}
        self._writing: IncomingTransfer | None = None
        self._lock = threading.Condition()  # of `_transfers` and `_writing`
        self._memories = PeerMemories(share)
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
    def takes_quantised(self) -> bool:
        return self._quantised is not None

    def take_quantised(self, blocks: IncomingBlocks) -> None:
        """Receive frames of 8-bit numbers into `blocks`, which commits them to the cache. Call it before `start`."""
        self._quantised = blocks

    def reach_with(self, reach: Callable[[PeerMemory], Reached]) -> None:
        """Let a device copy out of the rings of other workers without a buffer. Call it before `start`."""
        self._memories.reach_with(reach)

    def import_with(self, open_device: Callable[[KVDevice], ImportedMemory]) -> None:
        """Let this worker's GPU copy out of those that offer it. Call it before `start`."""
        self._memories.import_with(open_device)

    def read_with(self, reads: RemoteReads) -> None:
        """Read blocks of workers that offer them for NIXL. Call it before `start`; the thread closes `reads`."""
        self._reads = reads
        self._memories.read_with(reads)

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
                if self._reads is not None:
                    for read in self._reads.finished():
                        self._land(read)
                self._drops.flush(time.monotonic())
        except BaseException as error:
            log.exception("KV receiver died")
            self.failure = error
        finally:
            self._memories.close()
            if self._reads is not None:
                self._reads.close()
            self._socket.close()
            self._outbox.close()

    def _poll_ms(self) -> int:
        soon = self._reads.poll_ms if self._reads is not None else None
        return POLL_MS if soon is None else soon

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
                received_at = time.monotonic()
                self._on_event(TransferOpened(peer, message, received_at, self._memories.of(message)))
            case KVDone():
                self._finish(message)
            case KVFailed(request_id=request_id, attempt=attempt, reason=reason, phase=phase):
                self._on_event(TransferFailed(request_id, attempt, reason, by_peer=True, peer=peer, phase=phase))
            case _:
                self._drop(f"{type(message).__name__} is not for a decode worker's KV socket")

    def _receive_blocks(self, peer: bytes, header: KVBlocks) -> None:
        if self._reads is None or not header.sources or not self._begin_read(self._reads, peer, header):
            self._write(peer, header)

    def _begin_read(self, reads: RemoteReads, peer: bytes, header: KVBlocks) -> bool:
        """Let the blocks of a message land here, if they are to be read with NIXL. False: they are not."""
        with self._lock:
            transfer = self._transfer_of(header)
        if transfer is None or not isinstance(transfer.memory, RemoteMemory):
            return False
        if extra := discard_rest(self._socket):
            problem = f"{extra} frames behind blocks that are to be read"
        else:
            problem = reads.begin(peer, header, transfer.memory)
        if problem:
            self._fail(transfer, problem)
        return True

    def _land(self, read: RemoteRead) -> None:
        """Take the blocks of a read that has ended, if their transfer still wants them."""
        if read.landed is not None:
            self._write(read.peer, read.header, read.landed)
            return
        with self._lock:
            transfer = self._transfer_of(read.header)
        if transfer is not None:
            self._fail(transfer, read.problem)

    def _write(self, peer: bytes, header: KVBlocks, landed: LandedBlocks | None = None) -> None:
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
        self, transfer: IncomingTransfer, header: KVBlocks, landed: LandedBlocks | None
    ) -> tuple[int, str]:
        """Write the blocks of a message into the cache: the bytes of those that are intact, and what was wrong."""
        view, commit = self._places_of(transfer)
        memory = landed or transfer.memory

        def destination(index: int) -> memoryview | None:
            return view(transfer.blocks[index]) if transfer.wants(index) else None

        if not header.sources:
            received, problem = receive_blocks(self._socket, header, destination)
        elif landed is None and (extra := discard_rest(self._socket)):
            received, problem = [], f"{extra} frames behind blocks that are to be copied"
        elif memory is None or isinstance(memory, RemoteMemory):
            received, problem = [], "blocks are to be copied from memory that this worker cannot read"
        elif not isinstance(memory, LandedBlocks) and (reached := memory.reached) is not None:
            try:
                received, problem = copy_blocks(
                    header,
                    lambda copies: reached.copy((place, transfer.blocks[index]) for place, index in copies),
                    transfer.wants,
                )
            except DriverError as error:
                received, problem = [], f"the GPU does not copy: {error}"
            return self._count(transfer, received, len(received) * reached.block_bytes), problem
        else:
            assert not isinstance(memory, ImportedMemory)  # that has a GPU which reaches it
            received, problem = copy_blocks(
                header,
                lambda copies: (read_block(memory.read, place, view(transfer.blocks[i])) for place, i in copies),
                transfer.wants,
            )
        blocks = [transfer.blocks[index] for index in received]
        num_bytes = sum(len(view(block)) for block in blocks)
        commit(blocks)
        return self._count(transfer, received, num_bytes), problem

    def _count(self, transfer: IncomingTransfer, received: Sequence[int], num_bytes: int) -> int:
        """Count `received` blocks, of `num_bytes` bytes, which are verified and in the cache."""
        transfer.received.update(received)
        transfer.num_bytes += num_bytes
        self.num_bytes += num_bytes
        return num_bytes

    def _places_of(
        self, transfer: IncomingTransfer
    ) -> tuple[Callable[[int], memoryview], Callable[[Sequence[int]], None]]:
        """(view, commit): where the blocks of a transfer arrive, and how they get into the cache from there."""
        if transfer.quantised and self._quantised is not None:
            return self._quantised.view, self._quantised.commit
        return self._block_view, self._commit

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
