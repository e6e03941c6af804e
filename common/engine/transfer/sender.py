"""Sends KV blocks to decode workers, on a dedicated thread, so that transfers overlap with the next step's compute.

A prefill worker sends prompts; a draining decode worker sends the sequences that it hands over. A receiver that accepts
the offer of this worker's transport gets block or slot numbers and copies the blocks. Other receivers get frames,
quantised to 8 bits if offered and accepted.

    opened ──KVGrant──> granted ──blocks computed and sent──> drained ──KVDone──> finished ──KVAck──> gone
       └──────── KVWait renews the lease ────────┘      KVFailed or an expired lease ends it from any state

The engine owns the blocks. This thread reads them from `open` until `cancel` returned or the end was reported. If a
block is freed while ZeroMQ still points to it, the frame is corrupted at worst. The receiver detects that by the
checksum, which was computed earlier.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

import zmq
from msgspec.structs import replace

from common.engine.transfer.connection import KVConnection
from common.engine.transfer.frames import blocks_per_message, events, try_send
from common.engine.transfer.mailbox import Mailbox
from common.engine.transfer.transports.interface import OutgoingEnd
from common.engine.transfer.transports.tcp import Frames
from common.errors import WireError
from common.wire import Curve, DropLog, decode
from common.wire.messages import KVAck, KVDone, KVFailed, KVGrant, KVOpen, KVTaken, KVTarget, KVWait, ToPrefill

log = logging.getLogger(__name__)
IDLE_CONNECTION_S = 60.0
"""Idle time, in seconds, after which a connection without transfers is closed."""
ANNOUNCE_S = 1.0
"""Interval, in seconds, of keep-alives to a decode worker while this worker computes the prompt."""


@dataclass(frozen=True, slots=True)
class TransferEnded:
    """End of a transfer, reported to the engine once. `reason` is "" if the decode worker acknowledged.

    `exposed_s` is the time from the end of prefill to the acknowledgement. Durations are in seconds. `num_bytes` were
    sent or offered for copying. `transport` is the name of the KV transport.
    """

    request_id: str
    attempt: int
    reason: str
    num_shipped: int
    num_skipped: int
    grant_wait_s: float
    transfer_s: float
    exposed_s: float
    transport: str = "tcp"
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class TransferAdvanced:
    """A growing transfer was granted or has caught up: the receiver has all blocks that were full at the query."""

    request_id: str
    attempt: int
    caught_up: bool


class TransferState(Enum):
    OPENED = auto()
    """The receiver was asked for blocks."""
    GRANTED = auto()
    """Blocks are sent while the prompt is computed."""
    FINISHED = auto()
    """All blocks and `KVDone` were sent; the receiver has not acknowledged yet."""


class CatchUpState(Enum):
    """Progress of a growing transfer. Its sequence may pause once the receiver has all full blocks."""

    NOT_GRANTED = auto()
    GRANTED = auto()
    """The engine was notified of the grant."""
    ASKED = auto()
    """The sender asked, after all full blocks, whether they have arrived."""
    ANSWERED = auto()
    COMPLETE = auto()
    """The engine was notified of the answer."""


@dataclass(slots=True, eq=False)
class OutgoingTransfer:
    """Transfer of one prompt, or of one growing sequence, to a decode worker.

    `num_ready` of `blocks` are computed. Once granted, `next_block` is the first that was not sent; the receiver
    already had the blocks before `first_block`. `token` is the secret of the grant. `revoked`: the engine revoked the
    blocks; only the engine thread sets it, under the sender's lock. Once granted, `shared` means that the receiver
    accepted the offer of `transport`, and `quantised` that frames are 8-bit integers. `announced_at` is the time of the
    last announcement, 0 before the first.

    A growing sequence announces `room` blocks. Its `blocks` are those it has so far, and all of them once `done` is
    set. For a prompt, `room` is 0, and all blocks are known from the start (-1 for a block computed later).

    Blocks before `first_kept` are outside the model's window and are not lent.

    `revision` counts how often the engine withdrew all blocks to pass others later; only the engine thread changes it,
    under the sender's lock. `blocks` are those of `known_revision`.
    """

    request_id: str
    attempt: int
    target: KVTarget
    blocks: Sequence[int]
    opened_at: float
    lease_until: float
    num_ready: int = 0
    room: int = 0
    first_kept: int = 0
    state: TransferState = TransferState.OPENED
    transport: str = "tcp"
    shared: bool = False
    quantised: bool = False
    catch_up: CatchUpState = CatchUpState.NOT_GRANTED
    first_block: int = 0
    next_block: int = 0
    granted_at: float = 0.0
    done: KVDone | None = None
    done_at: float = 0.0
    num_bytes: int = 0
    stream: int = 0
    announced_at: float = 0.0
    revoked: bool = False
    token: int = 0
    revision: int = 0
    known_revision: int = 0

    @property
    def key(self) -> tuple[str, int]:
        return (self.request_id, self.attempt)

    @property
    def num_announced(self) -> int:
        """Number of blocks that the receiver is asked to allocate."""
        return self.room or len(self.blocks)

    @property
    def announced(self) -> str:
        """Range of blocks that may be granted, for messages."""
        return f"{self.first_kept} to {self.num_announced}"

    def grant(self, first_block: int, now: float) -> bool:
        """Record that the decode worker wants blocks from `first_block`. Returns False for an invalid grant."""
        if self.state is not TransferState.OPENED or not self.first_kept <= first_block <= self.num_announced:
            return False
        self.state = TransferState.GRANTED
        self.first_block = self.next_block = first_block
        self.granted_at = self.announced_at = now
        return True

    def finish(self) -> None:
        """Record that `KVDone` was sent."""
        self.state = TransferState.FINISHED

    def ask(self) -> None:
        """Record that the sender asked, after all full blocks, whether they have arrived."""
        if self.catch_up is CatchUpState.GRANTED:
            self.catch_up = CatchUpState.ASKED

    def answer(self) -> None:
        """Record that the receiver confirmed their arrival. Unsolicited confirmations are ignored."""
        if self.catch_up is CatchUpState.ASKED:
            self.catch_up = CatchUpState.ANSWERED

    def shippable(self, limit: int) -> range:
        """Return up to `limit` next block indices that are granted, computed and not sent."""
        if self.state is TransferState.OPENED or self.is_withdrawn:
            return range(0)
        return range(self.next_block, max(self.next_block, min(self.num_ready, self.next_block + limit)))

    def advanced(self) -> TransferAdvanced | None:
        """Return the event due for the engine, if any: once when granted, once when caught up."""
        if not self.room or self.state is TransferState.OPENED:
            return None
        following = {CatchUpState.NOT_GRANTED: CatchUpState.GRANTED, CatchUpState.ANSWERED: CatchUpState.COMPLETE}.get(
            self.catch_up
        )
        if following is None:
            return None
        self.catch_up = following
        return TransferAdvanced(self.request_id, self.attempt, following is CatchUpState.COMPLETE)

    def ended(self, reason: str, now: float) -> TransferEnded:
        """Return the end event of a transfer that ends at `now`."""
        granted_at = self.granted_at or now
        return TransferEnded(
            self.request_id,
            self.attempt,
            reason,
            self.next_block - self.first_block,
            max(0, self.first_block - self.first_kept),
            granted_at - self.opened_at,
            now - granted_at,
            now - self.done_at if self.done_at else 0.0,
            self.transport,
            self.num_bytes,
        )

    @property
    def drained(self) -> bool:
        """Whether every granted block was passed to the socket, so that only KVDone remains to be sent."""
        return self.state is not TransferState.OPENED and self.next_block >= len(self.blocks)

    @property
    def is_withdrawn(self) -> bool:
        """Whether the engine withdrew the blocks and has not passed others yet."""
        return self.revision != self.known_revision

    @property
    def wants_echo(self) -> bool:
        """Whether a growing transfer should ask, after all full blocks, whether they have arrived.

        Blocks passed to a socket may remain in its queue for a long time.
        """
        return bool(self.room) and self.computing and self.catch_up is CatchUpState.GRANTED

    @property
    def computing(self) -> bool:
        """Whether the next step is computing on this worker, so that no answer from the decode worker is due."""
        return self.state is TransferState.GRANTED and self.done is None and not self.shippable(1)

    @property
    def can_finish(self) -> bool:
        return self.state is TransferState.GRANTED and self.drained and self.done is not None


@dataclass(frozen=True, slots=True)
class _Progress:
    key: tuple[str, int]
    num_ready: int
    done: KVDone | None
    blocks: tuple[int, ...] | None
    revision: int


@dataclass(frozen=True, slots=True)
class _Cancel:
    transfer: OutgoingTransfer
    reason: str
    phase: str


class KVSender:
    """Sends KV. Only the engine thread calls `open`, `progress`, `withdraw` and `cancel`.

    `on_...` run on the sender's thread.
    A growing transfer (`room`) uses only the first of the `num_streams` connections, so that it arrives in order.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        frames: Frames,
        outgoing: OutgoingEnd | None,
        block_bytes: int,
        hello: tuple[str, int, str],
        on_ended: Callable[[TransferEnded], None],
        *,
        lease_s: float,
        num_streams: int,
        on_advanced: Callable[[TransferAdvanced], None] = lambda event: None,
        curve: Curve | None = None,
    ) -> None:
        """`outgoing` is offered to every decode worker and closed with the sender. None: all blocks use `frames`."""
        self._context, self._frames, self._outgoing = context, frames, outgoing
        self._on_ended, self._on_advanced = on_ended, on_advanced
        self._worker_id, self._epoch, self._fingerprint = hello
        self._lease_s, self._num_streams, self._curve = lease_s, num_streams, curve
        self._batch = blocks_per_message(block_bytes)
        self._commands: Mailbox[OutgoingTransfer | _Progress | _Cancel | None] = Mailbox(context)
        self._lent: dict[tuple[str, int], OutgoingTransfer] = {}  # opened and not cancelled; engine thread only
        self._lock = threading.Lock()  # held while blocks are read
        self._connections: dict[str, KVConnection] = {}
        self._transfers: dict[tuple[str, int], OutgoingTransfer] = {}
        self._unopened: dict[tuple[str, int], None] = {}
        self._poller = zmq.Poller()
        self._poller.register(self._commands.socket, zmq.POLLIN)
        self.num_bytes, self._drops = 0, DropLog(log, "a KV frame")
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name="kv-sender", daemon=True)

    @property
    def num_dropped_frames(self) -> int:
        return self._drops.num_dropped

    @property
    def quantises(self) -> bool:
        """Whether blocks may be quantised, which reads whole blocks, including unused slots."""
        return self._frames.quantise is not None

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 2.0) -> None:
        """Stop the thread if it runs, and close the sockets. Call once, from the engine thread or after it ended."""
        if self._thread.ident is None:
            self._close()
        else:
            self._commands.put(None)
            self._thread.join(timeout_s)
        self._commands.close_sending()

    def open(
        self, request_id: str, attempt: int, target: KVTarget, blocks: Sequence[int], num_ready: int, room: int = 0,
        first_block: int = 0,
    ) -> None:  # fmt: skip
        """Announce a prompt to its decode worker. The first `num_ready` blocks are already computed.

        `room`: maximum number of blocks of a growing sequence, 0 for a prompt. `first_block`: first block lent.
        """
        now = time.monotonic()
        lent = (tuple(blocks), now, now + self._lease_s, num_ready, room, first_block)
        transfer = OutgoingTransfer(request_id, attempt, target, *lent)
        self._lent[transfer.key] = transfer
        self._commands.put(transfer)

    def progress(
        self, request_id: str, attempt: int, num_ready: int, done: KVDone | None = None,
        blocks: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        """Allow blocks up to `num_ready` to be sent. `done` accompanies the last; `blocks` replaces a grown list."""
        key = (request_id, attempt)
        revision = self._lent[key].revision if key in self._lent else 0
        given = None if blocks is None else tuple(blocks)
        self._commands.put(_Progress(key, num_ready, done, given, revision))

    def withdraw(self, request_id: str, attempt: int) -> None:
        """Withdraw the blocks of a preempted prompt. The sender reads none of them after this returns.

        The transfer continues with the `blocks` of the next `progress`. Blocks that were sent are not sent again.
        """
        transfer = self._lent.get((request_id, attempt))
        if transfer is not None:
            with self._lock:
                transfer.revision += 1

    def cancel(self, request_id: str, attempt: int, reason: str, phase: str = "") -> None:
        """Revoke the blocks and notify the decode worker. The sender reads none of them after this returns."""
        transfer = self._lent.pop((request_id, attempt), None)
        if transfer is not None:
            with self._lock:
                transfer.revoked = True
            self._commands.put(_Cancel(transfer, reason, phase))

    def _main(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:
            log.exception("KV sender died")
            self.failure = error
        finally:
            self._close()

    def _close(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._commands.close()
        if self._outgoing is not None:
            self._outgoing.close()

    def _turn(self) -> bool:
        """Run one round: commands, replies, sending, leases. Returns False to stop."""
        self._poller.poll(self._poll_timeout_ms())
        if not self._take_commands():
            return False
        for connection in list(self._connections.values()):
            for stream in connection.streams:
                self._receive(connection, stream)
        now = time.monotonic()
        self._dial(now)
        self._ship()
        self._notify_advanced()
        self._drops.flush(now)
        self._announce(now)
        self._expire(now)
        return True

    def _poll_timeout_ms(self) -> int:
        now = time.monotonic()
        leases = (t.lease_until for t in self._transfers.values() if not t.computing)
        dials = (connection.dial_at for connection in self._connections.values())
        until = min((*leases, *dials, now + ANNOUNCE_S))
        return max(0, int((until - now) * 1000) + 1)

    def _take_commands(self) -> bool:
        for command in self._commands.take():
            match command:
                case None:
                    return False
                case OutgoingTransfer():
                    self._begin(command)
                case _Progress(key, num_ready, done, blocks, revision):
                    transfer = self._transfers.get(key)
                    if transfer is not None and transfer.revision == revision:  # otherwise these blocks are withdrawn
                        now = time.monotonic()
                        transfer.num_ready, transfer.lease_until = num_ready, now + self._lease_s
                        transfer.known_revision = revision
                        transfer.blocks = blocks or transfer.blocks
                        if done is not None:
                            transfer.done, transfer.done_at = done, now
                case _Cancel(transfer, reason, phase):
                    if self._transfers.get(transfer.key) is transfer:
                        self._send_failed(transfer, reason, phase)
                        self._forget(transfer)
        return True

    def _begin(self, transfer: OutgoingTransfer) -> None:
        address = transfer.target.address
        if (connection := self._connections.get(address)) is None:
            try:
                connection = KVConnection(self._context, self._poller, address, self._num_streams, self._curve)
            except zmq.ZMQError as error:
                why = f"cannot connect to decode worker {transfer.target.worker_id} at {address}: {error}"
                self._on_ended(transfer.ended(why, time.monotonic()))
                return
            self._connections[address] = connection
        connection.num_transfers += 1
        self._transfers[transfer.key] = transfer
        self._unopened[transfer.key] = None

    def _dial(self, now: float) -> None:
        """Redial broken connections, and repeat the announcements of those that were cut or redialled.

        A reconnected socket has a new routing id: answers to the previous one are lost, and blocks may be. Transfers to
        a worker that rejects connections end.
        """
        for address, connection in self._connections.items():
            if connection.dial_again(now):
                theirs = [transfer for transfer in self._transfers.values() if transfer.target.address == address]
                for transfer in theirs:
                    if connection.refusal:
                        worker = transfer.target.worker_id
                        self._end(transfer, f"decode worker {worker} rejects connections: {connection.refusal}")
                    else:
                        self._unopened[transfer.key] = None

    def _receive(self, connection: KVConnection, stream: zmq.Socket[bytes]) -> None:
        while events(stream) & zmq.POLLIN:
            parts = stream.recv_multipart()
            try:
                if len(parts) != 1:
                    raise WireError(f"{len(parts)} parts instead of 1")
                message = decode(parts[0])
            except WireError as error:
                self._drop(str(error))
                continue
            match message:
                case KVGrant() | KVWait() | KVTaken() | KVAck() | KVFailed():
                    self._reply(connection, stream, message)
                case _:
                    self._drop(f"unexpected {type(message).__name__}")

    def _reply(self, connection: KVConnection, stream: zmq.Socket[bytes], message: ToPrefill) -> None:
        transfer = self._transfers.get((message.request_id, message.attempt))
        if transfer is None:
            if isinstance(message, KVGrant | KVWait):  # otherwise the receiver would keep its blocks or queue entry
                why = "the sender no longer has this transfer"
                try_send(stream, KVFailed(request_id=message.request_id, attempt=message.attempt, reason=why))
            return
        if self._connections[transfer.target.address] is not connection:
            self._drop(f"{type(message).__name__} for {transfer.request_id} from the wrong decode worker")
            return
        now = time.monotonic()
        transfer.lease_until = now + self._lease_s
        match message:
            case KVGrant():
                self._on_grant(transfer, message, now)
            case KVWait():
                transfer.answer()
            case KVTaken(places=places):
                if self._outgoing is not None and not self._outgoing.taken(transfer, places):
                    self._drop(f"KVTaken for slots that were not lent to {transfer.request_id}")
            case KVAck():
                self._end(transfer, "")
            case KVFailed(reason=reason):
                self._end(transfer, f"the decode worker ended the transfer: {reason}")

    def _on_grant(self, transfer: OutgoingTransfer, grant: KVGrant, now: float) -> None:
        worker, outgoing = transfer.target.worker_id, self._outgoing
        if what := self._not_offered(grant):
            self._drop(f"grant for {transfer.request_id} requires {what}, which was not offered")
        elif outgoing is not None and outgoing.is_required and not grant.shared:
            why = f"decode worker {worker} cannot read this worker's memory, and --kv-transport is {outgoing.transport}"
            self._send_failed(transfer, why)
            self._end(transfer, why)
        elif not transfer.grant(grant.first_block, now):
            self._drop(
                f"invalid grant for {transfer.request_id} from block {grant.first_block}: must be {transfer.announced}"
            )
        else:
            transfer.token, transfer.shared, transfer.quantised = grant.token, grant.shared, grant.quantised
            way = "TCP" + ", quantised to 8 bits" * grant.quantised
            if grant.shared and outgoing is not None:
                transfer.transport, way = outgoing.transport, outgoing.description
            connection = self._connections[transfer.target.address]
            if connection.way != way:
                connection.way = way
                log.info("KV transfer to %s: %s", worker, way)

    def _not_offered(self, grant: KVGrant) -> str:
        """Return what a grant requires that was not offered, or ""."""
        if grant.shared and self._outgoing is None:
            return "shared memory"
        return "8-bit frames" if grant.quantised and (grant.shared or self._frames.quantise is None) else ""

    def _ship(self) -> None:
        """Send one message per transfer in turn until all are drained or their sockets are full."""
        blocked: set[zmq.Socket[bytes]] = set()
        for key in list(self._unopened):
            transfer = self._transfers[key]
            if try_send(self._streams(transfer)[0], self._open_message(transfer)):
                transfer.announced_at = time.monotonic()
                del self._unopened[key]
            else:
                blocked.add(self._streams(transfer)[0])
        active = [t for t in self._transfers.values() if t.shippable(1) or t.can_finish]
        while active:
            active = [transfer for transfer in active if self._ship_one(transfer, blocked)]
            if self._commands.is_waiting:
                break
        for connection in self._connections.values():
            for stream in connection.streams:
                self._poller.modify(stream, zmq.POLLIN | (zmq.POLLOUT if stream in blocked else 0))

    def _ship_one(self, transfer: OutgoingTransfer, blocked: set[zmq.Socket[bytes]]) -> bool:
        """Send the transfer's next message. Returns True if it has more to send and its socket is not full."""
        streams = self._streams(transfer)
        indices = transfer.shippable(self._batch)
        if indices:
            stream = streams[0 if transfer.room else transfer.stream % len(streams)]
            if not events(stream) & zmq.POLLOUT:  # checked first, because a view may copy or quantise
                blocked.add(stream)
                return False
            end = self._outgoing if transfer.shared and self._outgoing is not None else self._frames
            if (prepared := end.ship(transfer, indices)) is None:
                return False  # wait for the receiver to return slots
            with self._lock:
                is_lent = not transfer.revoked and not transfer.is_withdrawn
                sent = is_lent and prepared.try_send(stream, transfer)
            if not sent:
                if self._outgoing is not None:
                    self._outgoing.undo(transfer, prepared)
                blocked.update((stream,) if is_lent else ())
                return False
            transfer.next_block, transfer.stream = prepared.indices.stop, transfer.stream + 1
            transfer.lease_until = time.monotonic() + self._lease_s
            transfer.num_bytes += prepared.num_bytes
            self.num_bytes += prepared.num_bytes
            return bool(transfer.shippable(1)) or transfer.can_finish
        if transfer.can_finish and transfer.done is not None:
            if try_send(streams[0], replace(transfer.done, token=transfer.token)):
                transfer.finish()
            else:
                blocked.add(streams[0])
        return False

    def _notify_advanced(self) -> None:
        """Notify the engine of growing transfers that were granted or have caught up."""
        for transfer in self._transfers.values():
            if (event := transfer.advanced()) is not None:
                self._on_advanced(event)

    def _announce(self, now: float) -> None:
        """Send keep-alives to decode workers while this worker computes their blocks."""
        for transfer in self._transfers.values():
            if transfer.wants_echo or (transfer.computing and transfer.announced_at < now - ANNOUNCE_S):
                transfer.announced_at = now
                if try_send(self._streams(transfer)[0], self._open_message(transfer)):
                    transfer.ask()

    def _expire(self, now: float) -> None:
        for transfer in [t for t in self._transfers.values() if t.lease_until < now and not t.computing]:
            self._send_failed(transfer, "lease expired")
            self._end(transfer, f"decode worker {transfer.target.worker_id} sent nothing for {self._lease_s:g} s")
        idle = [
            address
            for address, connection in self._connections.items()
            if connection.num_transfers == 0 and connection.used_at < now - IDLE_CONNECTION_S
        ]
        for address in idle:
            self._connections.pop(address).close()

    def _send_failed(self, transfer: OutgoingTransfer, reason: str, phase: str = "") -> None:
        message = KVFailed(request_id=transfer.request_id, attempt=transfer.attempt, reason=reason[:1000], phase=phase)
        stream = self._streams(transfer)[0]
        is_known = transfer.key not in self._unopened
        if not is_known and transfer.announced_at:  # receivers ignore failures from a routing id that announced nothing
            is_known = try_send(stream, self._open_message(transfer))
        if is_known:
            try_send(stream, message)  # if the queue is full, the receiver's deadline applies

    def _end(self, transfer: OutgoingTransfer, reason: str) -> None:
        self._forget(transfer)
        self._on_ended(transfer.ended(reason, time.monotonic()))

    def _forget(self, transfer: OutgoingTransfer) -> None:
        del self._transfers[transfer.key]
        self._unopened.pop(transfer.key, None)
        if self._outgoing is not None:
            self._outgoing.end(transfer)
        connection = self._connections[transfer.target.address]
        connection.num_transfers -= 1
        connection.used_at = time.monotonic()

    def _streams(self, transfer: OutgoingTransfer) -> list[zmq.Socket[bytes]]:
        return self._connections[transfer.target.address].streams

    def _open_message(self, transfer: OutgoingTransfer) -> KVOpen:
        return KVOpen(
            request_id=transfer.request_id,
            attempt=transfer.attempt,
            worker_id=self._worker_id,
            epoch=self._epoch,
            decode_epoch=transfer.target.epoch,
            fingerprint=self._fingerprint,
            num_blocks=transfer.num_announced,
            sent_at=time.monotonic(),
            offer=self._outgoing.offer if self._outgoing is not None else None,
            quantised=self.quantises,
            first_block=transfer.first_kept,
        )

    def _drop(self, why: str) -> None:
        self._drops.add(why, time.monotonic())
