"""Pulls cached blocks from other workers, on a dedicated thread. The peer's side is in `lender.py`.

The engine passes a prompt's blocks as for a tier read (`BlockRead`). The thread verifies each block in a buffer before
it copies it into the cache, and writes nothing after `BlockRead.cancel` returned. If a peer is silent, refuses, sends
unrequested data or no longer has a block, only the pull ends: the prompt continues from the blocks received.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import zmq

from common.engine.kv import checksum
from common.engine.kv.tiers import BlockRead, ReadEnded
from common.engine.transfer.connection import KVConnection
from common.engine.transfer.frames import (
    MAX_FRAME_BYTES,
    blocks_per_message,
    discard_rest,
    events,
    try_send,
)
from common.engine.transfer.lender import KVLender
from common.engine.transfer.mailbox import Mailbox
from common.engine.transfer.peer_memories import PeerMemories
from common.engine.transfer.transports.interface import IncomingEnd, ReadableMemory
from common.errors import WireError
from common.latency import LinkFit, LinkModel
from common.wire import COUNT_BITS, Curve, DropLog, decode
from common.wire.messages import KVAck, KVBlocks, KVFailed, KVOpen, KVPeer, KVPull, Message

if TYPE_CHECKING:
    from common.engine.kv import IncomingBlocks

log = logging.getLogger(__name__)
PEER = "peer"
"""Name of this source of blocks, alongside the names of tiers."""
MAX_PULLS = 4
"""Maximum number of concurrent pulls per worker. Further prompts are computed."""
AVOID_S = 10.0
"""How long, in seconds, a peer is not used after it was silent until a pull's deadline."""
MAX_CONNECTIONS = 64
"""Maximum number of open connections to peers. The least recently used one is closed first."""
CANCELLED_S = 0.05
"""Poll interval, in seconds, for cancelled pulls."""
ASSUMED_PULL_BYTES_S, ASSUMED_LATENCY_S = 5e8, 2e-3
"""Assumed throughput (bytes per second) and latency (seconds) until a pull has been measured."""
AHEAD = 4
"""Number of full messages requested ahead of the first that arrives."""


@dataclass(slots=True, eq=False)
class Pull:
    """Pull of the blocks of `read` from `peer`, in order. `token` is the secret of this pull.

    The first `num_asked` blocks have been requested, with layout `fingerprint`; `num_bytes` have arrived. If `shared`,
    blocks are copied out of the peer's memory. Times are monotonic, in seconds.
    """

    read: BlockRead
    peer: KVPeer
    fingerprint: str
    token: int
    began: float
    num_asked: int = 0
    num_bytes: int = 0
    shared: bool = False

    @property
    def key(self) -> tuple[str, int]:
        return (self.read.request_id, self.read.attempt)

    @property
    def is_whole(self) -> bool:
        return self.read.num_done == len(self.read.blocks)

    def opening(self) -> KVPull:
        """Return the request for the peer's offer."""
        return self._message(b"")

    def next_ask(self, batch: int) -> KVPull | None:
        """Return the next request, for up to `batch` blocks; None if enough are in flight or all were requested."""
        begin, end = self.num_asked, min(self.num_asked + batch, len(self.read.hashes))
        if begin == end or begin - self.read.num_done > (AHEAD - 1) * batch:
            return None
        self.num_asked = end
        return self._message(b"".join(self.read.hashes[begin:end]), begin)

    def mismatch(self, header: KVBlocks) -> str:
        """Return why the blocks of a header are not the next ones, or ""."""
        last = header.first_block + len(header.checksums)
        if header.first_block != self.read.num_done or last > self.num_asked:
            wanted = f"{self.read.num_done} to {self.num_asked}"
            return f"received blocks {header.first_block} to {last} instead of {wanted}"
        return ""

    def _message(self, hashes: bytes, first_block: int = 0) -> KVPull:
        return KVPull(
            request_id=self.read.request_id,
            attempt=self.read.attempt,
            epoch=self.peer.epoch,
            fingerprint=self.fingerprint,
            first_block=first_block,
            hashes=hashes,
            token=self.token,
            shared=self.shared,
        )


class KVPuller:
    """Runs pulls. `can_pull`, `pull`, `link` and `stop` are for the engine thread; `notify` runs on the puller's."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        fingerprint: str,
        block_bytes: int,
        incoming: IncomingBlocks,
        notify: Callable[[ReadEnded], None],
        *,
        transport: IncomingEnd[Any] | None = None,
        required: str = "",
        curve: Curve | None = None,
    ) -> None:
        """`transport` accepts `ReadableMemory` that peers offer.

        `required`: transport whose offers must be readable; "" allows frames.
        """
        self._context, self._fingerprint, self._curve = context, fingerprint, curve
        self._incoming, self._notify, self._required = incoming, notify, required
        self._block_bytes, self._batch = block_bytes, blocks_per_message(block_bytes)
        self._memories = PeerMemories(() if transport is None else (transport,))
        self._commands: Mailbox[Pull | None] = Mailbox(context)
        self._lock = threading.Lock()
        self._num_active = 0
        self._avoided: dict[str, float] = {}
        self._pulls: dict[tuple[str, int], Pull] = {}
        self._connections: OrderedDict[tuple[str, int], KVConnection] = OrderedDict()  # least recently used first
        self._offers: dict[tuple[str, int], ReadableMemory | None] = {}
        self._poller = zmq.Poller()
        self._poller.register(self._commands.socket, zmq.POLLIN)
        self._fit = LinkFit()
        self._assumed = LinkModel(latency_s=ASSUMED_LATENCY_S, byte_s=1 / ASSUMED_PULL_BYTES_S, block_bytes=block_bytes)
        self._drops = DropLog(log, "a frame of a pull")
        self._thread = threading.Thread(target=self._main, name="kv-puller", daemon=True)

    # ------------------------------------------------------------ engine thread

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 2.0) -> None:
        """Stop the thread if it runs, and close the sockets."""
        if self._thread.ident is None:
            self._close()
        else:
            self._commands.put(None)
            self._thread.join(timeout_s)
        self._commands.close_sending()

    @property
    def link(self) -> LinkModel:
        """Measured time of pulls; an assumption until the first pull."""
        return self._fit.model if self._fit.model.is_known else self._assumed

    def can_pull(self, peer: KVPeer, now: float) -> bool:
        """Return whether another pull may start and the peer has not recently been silent."""
        with self._lock:
            is_avoided = self._avoided.get(peer.address, 0.0) > now
            return self._num_active < MAX_PULLS and not is_avoided and self._thread.is_alive()

    def pull(self, read: BlockRead, peer: KVPeer) -> None:
        """Start a pull. The thread may write to the blocks until `ReadEnded` or until `read.cancel` returned."""
        with self._lock:
            self._num_active += 1
        token = secrets.randbits(COUNT_BITS)
        self._commands.put(Pull(read, peer, self._fingerprint, token, time.monotonic()))

    # ------------------------------------------------------------ puller thread

    def _main(self) -> None:
        self._memories.watch(self._poller)
        try:
            while self._turn():
                pass
        except Exception:  # whatever the error: the worker continues, and its prompts are computed
            log.exception("KV puller died: this worker copies no cached blocks of other workers until it restarts")
        finally:
            self._close()

    def _close(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._memories.close()
        self._commands.close()

    def _turn(self) -> bool:
        ready = dict(self._poller.poll(int(1000 * CANCELLED_S) if self._pulls else 1000))
        self._memories.drop_dead(ready)
        for pull in self._commands.take():
            if pull is None:
                return False
            self._begin(pull)
        for address, connection in list(self._connections.items()):
            while events(connection.streams[0]) & zmq.POLLIN:
                self._receive(address, connection)
        now = time.monotonic()
        self._watch(now)
        self._drops.flush(now)
        return True

    def _begin(self, pull: Pull) -> None:
        if (former := self._pulls.get(pull.key)) is not None:
            self._end(former)  # already cancelled: a request has one read at a time
        self._pulls[pull.key] = pull
        where = (pull.peer.address, pull.peer.epoch)
        try:
            connection = self._connection(where)
        except zmq.ZMQError as error:
            self._fail(pull, f"cannot connect to {pull.peer.worker_id} at {pull.peer.address}: {error}")
            return
        if where in self._offers:
            self._opened(pull, self._offers[where])
        elif not try_send(connection.streams[0], pull.opening()):
            self._fail(pull, f"send queue to {pull.peer.worker_id} is full")

    def _connection(self, where: tuple[str, int]) -> KVConnection:
        """Return the connection to one epoch of a peer. Raises zmq.ZMQError."""
        connection = self._connections.get(where)
        if connection is None:
            connection = KVConnection(self._context, self._poller, where[0], 1, self._curve, MAX_FRAME_BYTES)
            self._connections[where] = connection
            if len(self._connections) > MAX_CONNECTIONS:
                self._hang_up(next(iter(self._connections)), f"too many peers (limit {MAX_CONNECTIONS})")
        self._connections.move_to_end(where)
        return connection

    def _hang_up(self, where: tuple[str, int], why: str) -> None:
        for pull in [pull for pull in self._pulls.values() if (pull.peer.address, pull.peer.epoch) == where]:
            self._fail(pull, why)
        self._offers.pop(where, None)
        self._connections.pop(where).close()

    def _opened(self, pull: Pull, memory: ReadableMemory | None) -> None:
        """Process the peer's offer: request blocks."""
        pull.shared = memory is not None and not memory.closed
        if self._required and not pull.shared:
            self._fail(
                pull, f"the memory of {pull.peer.worker_id} is not readable, and --kv-transport is {self._required}"
            )
        else:
            self._ask(pull)

    def _ask(self, pull: Pull) -> None:
        socket = self._connections[(pull.peer.address, pull.peer.epoch)].streams[0]
        while (message := pull.next_ask(self._batch)) is not None:
            if not try_send(socket, message):
                self._fail(pull, f"send queue to {pull.peer.worker_id} is full")
                return

    def _receive(self, where: tuple[str, int], connection: KVConnection) -> None:
        """Process one message. All of its parts are always consumed."""
        socket = connection.streams[0]
        try:
            message = decode(socket.recv())
        except WireError as error:
            discard_rest(socket)
            self._drops.add(str(error), time.monotonic())
            return
        pull = self._pull_of(message, where)
        if isinstance(message, KVBlocks):
            problem = self._take(socket, message, pull)
        else:
            problem = f"{discard_rest(socket)} frames after {type(message).__name__}" if _has_more(socket) else ""
        if pull is None:
            return  # the pull has ended
        match message:
            case _ if problem:
                self._fail(pull, problem)
            case KVBlocks() if pull.is_whole or pull.read.cancelled:
                self._end(pull)
            case KVBlocks():
                self._ask(pull)
            case KVOpen():
                self._on_offer(pull, message, where)
            case KVFailed(reason=reason):
                self._fail(pull, reason)
            case _:
                self._drops.add(f"unexpected {type(message).__name__}", time.monotonic())

    def _pull_of(self, message: Message, where: tuple[str, int]) -> Pull | None:
        """Return the pull that a message of this peer belongs to. Blocks must carry the pull's token."""
        pull = self._pulls.get((getattr(message, "request_id", ""), getattr(message, "attempt", -1)))
        if pull is None or (pull.peer.address, pull.peer.epoch) != where:
            return None
        return pull if not isinstance(message, KVBlocks) or message.token == pull.token else None

    def _on_offer(self, pull: Pull, offer: KVOpen, where: tuple[str, int]) -> None:
        peer = pull.peer
        if (offer.worker_id, offer.epoch, offer.fingerprint) != (peer.worker_id, peer.epoch, self._fingerprint):
            self._fail(pull, f"{offer.worker_id} of epoch {offer.epoch} answered instead of {peer.worker_id}")
        elif not pull.num_asked:
            try:
                found = self._memories.of(offer)
            except WireError as error:
                self._drops.add(str(error), time.monotonic())
                return
            self._offers[where] = memory = found if isinstance(found, ReadableMemory) else None
            self._opened(pull, memory)

    def _take(self, socket: zmq.Socket[bytes], header: KVBlocks, pull: Pull | None) -> str:
        """Copy a message's blocks into the cache, in order. Returns the problem, or "". Drops blocks of no pull."""
        if pull is None or (problem := pull.mismatch(header)):
            discard_rest(socket)
            return problem if pull is not None else ""
        memory = self._offers.get((pull.peer.address, pull.peer.epoch)) if header.sources else None
        if header.sources and (memory is None or len(header.sources) != len(header.checksums)):
            discard_rest(socket)
            return "the message names blocks in memory that this worker cannot read"
        for place, seal in enumerate(header.checksums):
            index = header.first_block + place
            block = pull.read.blocks[index]
            view = self._incoming.view(block)
            if memory is not None:
                is_here = memory.read(header.sources[place], view)
            elif is_here := _has_more(socket):
                is_here = socket.recv_into(view) == len(view)
            if not is_here or checksum(view) != seal:
                discard_rest(socket)
                return f"block {index} is corrupt, or was evicted during the copy"
            if not pull.read.commit(PEER, lambda block=block: self._incoming.commit([block])):  # type: ignore[misc]
                break  # cancelled by the engine
            pull.num_bytes += len(view)
        return f"{extra} extra frames" if (extra := discard_rest(socket)) and not pull.read.cancelled else ""

    def _watch(self, now: float) -> None:
        """Redial connections, end cancelled and overdue pulls, and avoid peers that were silent."""
        for where, connection in list(self._connections.items()):
            if connection.dial_again(now) or connection.was_cut:
                self._hang_up(where, connection.refusal or "connection lost")
        for pull in list(self._pulls.values()):
            if pull.read.cancelled or pull.read.deadline < now:
                pull.read.is_late = pull.read.deadline < now
                if pull.read.is_late and not pull.num_bytes:
                    self._avoid(pull.peer, now)
                self._observe(pull, now)
                self._end(pull)

    def _avoid(self, peer: KVPeer, now: float) -> None:
        with self._lock:
            self._avoided = {address: until for address, until in self._avoided.items() if until > now}
            self._avoided[peer.address] = now + AVOID_S
        log.warning("%s sent no blocks before a pull's deadline: not pulling from it for %g s", peer.worker_id, AVOID_S)

    def _fail(self, pull: Pull, why: str) -> None:
        log.info("request %s: pull from %s failed: %s", pull.read.request_id, pull.peer.worker_id, why)
        self._end(pull)

    def _observe(self, pull: Pull, now: float) -> None:
        if pull.num_bytes:
            self._fit.observe(pull.num_bytes, now - pull.began, self._block_bytes)

    def _end(self, pull: Pull) -> None:
        """End the pull. The engine may reuse the blocks."""
        if self._pulls.get(pull.key) is not pull:
            return
        del self._pulls[pull.key]
        if pull.is_whole:
            self._observe(pull, time.monotonic())
        connection = self._connections.get((pull.peer.address, pull.peer.epoch))
        if connection is not None:
            request_id, attempt = pull.key
            try_send(connection.streams[0], KVAck(request_id=request_id, attempt=attempt))
        with self._lock:
            self._num_active -= 1
        pull.read.ended = True
        self._notify(ReadEnded(pull.read))


@dataclass(frozen=True, slots=True)
class PeerCaches:
    """Both sides of pulls at one worker, already started. Closed by the engine thread."""

    lender: KVLender
    puller: KVPuller

    def close(self) -> None:
        self.lender.stop()
        self.puller.stop()


def _has_more(socket: zmq.Socket[bytes]) -> bool:
    return bool(socket.getsockopt(zmq.RCVMORE))
