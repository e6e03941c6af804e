"""Receives KV blocks into the decode worker's memory from a thread of its own, while the engine generates.

The engine owns the blocks and lends them with `expect`; after `release` returned, this thread writes to none of them.
Whatever it cannot match to a landing (unknown request, old attempt, the token of another grant, a block landed before)
is read off the socket and dropped, so a late or forged frame can do no harm. Blocks of a prefill worker whose memory
can be read are copied from there. Frames of 8-bit numbers land in buffers, from which they are dequantised.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import zmq

from common.errors import WireError
from common.kv.shared_memory import PeerMemory
from common.transfer.frames import MAX_FRAME_BYTES, copy_blocks, discard_rest, receive_blocks
from common.transfer.incoming import Landing
from common.transfer.mailbox import Mailbox
from common.transfer.peer_memories import PeerMemories
from common.wire.bind import bind
from common.wire.codec import decode, encode
from common.wire.curve import Curve
from common.wire.drop_log import DropLog
from common.wire.messages import KVAck, KVBlocks, KVDone, KVFailed, KVOpen, Message

if TYPE_CHECKING:
    from common.kv.staging import IncomingBlocks

log = logging.getLogger(__name__)
MAX_PEERS_HWM = 64


@dataclass(frozen=True, slots=True)
class TransferOpened:
    """A prefill worker announced KV; `peer` is where to answer, `received_at` this worker's clock.

    `memory` is the prefill worker's, if this worker can read it.
    """

    peer: bytes
    message: KVOpen
    received_at: float
    memory: PeerMemory | None = None


@dataclass(frozen=True, slots=True)
class TransferLanded:
    """Every block is here and verified, and the prefill worker's hold has ended."""

    landing: Landing


@dataclass(frozen=True, slots=True)
class TransferFailed:
    """The transfer is over. `by_peer`: `peer` says that it gave up; it may not be the one whose transfer that is."""

    request_id: str
    attempt: int
    reason: str
    by_peer: bool
    peer: bytes = b""


class KVReceiver:
    """`expect`, `release` and `send` are called by the engine's thread only; `on_event` is called on the receiver's."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        host: str,
        port: int,
        block_view: Callable[[int], memoryview],
        on_event: Callable[[TransferOpened | TransferLanded | TransferFailed], None],
        *,
        share: bool = True,
        commit: Callable[[Sequence[int]], None] = lambda blocks: None,
        curve: Curve | None = None,
    ) -> None:
        """`share`: read the memory of prefill workers that offer it, where that works.

        `commit` hears of blocks whose bytes are in their views and verified, before they count as landed.
        """
        self._socket = context.socket(zmq.ROUTER)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.RCVHWM, MAX_PEERS_HWM)
        self._socket.set(zmq.SNDHWM, 100_000)
        self._socket.set(zmq.RCVBUF, 4 * 1024 * 1024)
        self._socket.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self.address = bind(self._socket, host, port, curve)
        self._block_view, self._on_event, self._commit = block_view, on_event, commit
        self._quantised: IncomingBlocks | None = None
        self._landings: dict[tuple[str, int], Landing] = {}
        self._lock = threading.Lock()
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
        """Before `start`: where the frames of landings that are `quantised` land, and from where they are committed."""
        self._quantised = blocks

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

    def expect(self, landing: Landing) -> None:
        """Lend the landing's blocks. Call before the grant is sent."""
        with self._lock:
            self._landings[landing.key] = landing

    def release(self, request_id: str, attempt: int) -> Landing | None:
        """Take the blocks back: no frame is written to them once this returned."""
        with self._lock:
            return self._landings.pop((request_id, attempt), None)

    def touch(self, request_id: str, attempt: int, now: float) -> None:
        """The prefill worker is alive: its silence counts from `now`."""
        with self._lock:
            if (landing := self._landings.get((request_id, attempt))) is not None:
                landing.last_progress = now

    def stalled(self, before: float) -> list[Landing]:
        """Landings without any progress since `before`."""
        with self._lock:
            return [landing for landing in self._landings.values() if landing.last_progress < before]

    def _main(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._outbox.socket, zmq.POLLIN)
        self._memories.watch(poller)
        try:
            while True:
                ready = dict(poller.poll(1000))
                self._memories.drop_dead(ready)
                if not self._flush():
                    break
                if self._socket in ready:
                    self._receive()
                self._drops.flush(time.monotonic())
        except BaseException as error:
            log.exception("KV receiver died")
            self.failure = error
        finally:
            self._memories.close()
            self._socket.close()
            self._outbox.close()

    def _flush(self) -> bool:
        for item in self._outbox.take():
            if item is None:
                return False
            self._answer(*item)
        return True

    def _answer(self, peer: bytes, message: Message) -> None:
        # ROUTER drops what is for a peer that is gone: its lease ends by itself.
        self._socket.send_multipart([peer, encode(message)], zmq.NOBLOCK)

    def _receive(self) -> None:
        """One message. Every part of it is consumed, whatever it is."""
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
            self._land(message)
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
            case KVFailed(request_id=request_id, attempt=attempt, reason=reason):
                self._on_event(TransferFailed(request_id, attempt, reason, by_peer=True, peer=peer))
            case _:
                self._drop(f"{type(message).__name__} is not for a decode worker's KV socket")

    def _land(self, header: KVBlocks) -> None:
        began = time.monotonic()
        with self._lock:
            landing = self._landing_of(header)
            view, commit = self._places_of(landing)

            def destination(index: int) -> memoryview | None:
                wanted = landing is not None and landing.wants(index)
                return view(landing.blocks[index]) if wanted and landing is not None else None

            if header.sources:
                landed, problem = self._copy(header, landing, destination)
            else:
                landed, problem = receive_blocks(self._socket, header, destination)
            if landing is not None:
                blocks = [landing.blocks[index] for index in landed]
                num_bytes = sum(len(view(block)) for block in blocks)
                commit(blocks)
            now = time.monotonic()
            if landing is not None:
                landing.landed.update(landed)
                landing.num_bytes += num_bytes
                landing.last_progress = now
                landing.busy_s += now - began
        if landing is None:
            self._drop_late(f"{len(header.checksums)} blocks", header)
            return
        if landed:
            self.num_bytes += num_bytes
            landing.landed_at = now
        if problem:
            self._fail(landing, problem)
        elif landing.complete:
            self._complete(landing)

    def _places_of(
        self, landing: Landing | None
    ) -> tuple[Callable[[int], memoryview], Callable[[Sequence[int]], None]]:
        """Where the blocks of a landing come in, and what brings them into the cache from there."""
        if landing is not None and landing.quantised and self._quantised is not None:
            return self._quantised.view, self._quantised.commit
        return self._block_view, self._commit

    def _landing_of(self, message: KVBlocks | KVDone) -> Landing | None:
        """What a message belongs to, if it comes from whom that was granted to."""
        landing = self._landings.get((message.request_id, message.attempt))
        return landing if landing is not None and landing.token == message.token else None

    def _copy(
        self, header: KVBlocks, landing: Landing | None, destination: Callable[[int], memoryview | None]
    ) -> tuple[list[int], str]:
        extra = discard_rest(self._socket)
        if extra:
            return [], f"{extra} frames behind blocks that are to be copied"
        if landing is None:
            return [], ""
        if landing.memory is None:
            return [], "blocks are to be copied from memory that this worker cannot read"
        return copy_blocks(header, landing.memory.read, destination)

    def _finish(self, done: KVDone) -> None:
        with self._lock:
            landing = self._landing_of(done)
            if landing is None or landing.done is not None:
                landing = None
            else:
                landing.done = done
                landing.done_at = landing.last_progress = time.monotonic()
        if landing is None:
            self._drop_late("the end", done)
        elif not landing.first_block <= landing.num_blocks <= len(landing.blocks):
            self._fail(landing, f"{landing.num_blocks} blocks from {landing.first_block} on, of {len(landing.blocks)}")
        elif landing.complete:
            self._complete(landing)

    def _complete(self, landing: Landing) -> None:
        with self._lock:
            if self._landings.pop(landing.key, None) is None:
                return  # released while the last frame was on its way
        self._answer(landing.peer, KVAck(request_id=landing.request_id, attempt=landing.attempt))
        self._on_event(TransferLanded(landing))

    def _fail(self, landing: Landing, reason: str) -> None:
        self._drop(f"transfer {landing.request_id}/{landing.attempt} from a prefill worker: {reason}")
        if self.release(*landing.key) is not None:
            self._answer(landing.peer, KVFailed(request_id=landing.request_id, attempt=landing.attempt, reason=reason))
            self._on_event(TransferFailed(landing.request_id, landing.attempt, reason, by_peer=False))

    def _drop_late(self, what: str, message: KVBlocks | KVDone) -> None:
        """Frames of what was aborted meanwhile are nothing to warn of."""
        self._num_late += 1
        log.debug("dropped %s of %s/%d: not expected, or no more", what, message.request_id, message.attempt)

    def _drop(self, why: str) -> None:
        self._drops.add(why, time.monotonic())
