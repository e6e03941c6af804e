"""Ships KV blocks to decode workers from a thread of its own, so that transfer hides behind the next chunk's compute.

A decode worker that can read this worker's memory gets the blocks' numbers and copies them; the others get frames.

The engine owns the blocks; this thread reads them from `open` until `cancel` returned or it reported the end. A block
freed while ZeroMQ still points at it can only spoil a frame whose checksum then fails: none is checksummed after that.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import zmq

from diptych.common.errors import WireError
from diptych.common.kv_wire import blocks_per_message, dealer, events, try_send, try_send_blocks
from diptych.common.messages import KVAck, KVDone, KVFailed, KVGrant, KVMemory, KVOpen, KVTarget, KVWait, decode
from diptych.prefill_worker.transfer import OutgoingTransfer

log = logging.getLogger(__name__)
IDLE_CONNECTION_S = 60.0
ANNOUNCE_S = 1.0
"""How often a decode worker that granted hears that its prompt is still being computed here."""


@dataclass(frozen=True, slots=True)
class TransferEnded:
    """What the sender tells the engine, once per transfer. `reason` is "" when the decode worker acknowledged.

    `exposed_s` is the time from the end of prefill to the acknowledgement. Durations in seconds.
    """

    request_id: str
    attempt: int
    reason: str
    num_shipped: int
    num_skipped: int
    grant_wait_s: float
    transfer_s: float
    exposed_s: float
    shared: bool = False


@dataclass(frozen=True, slots=True)
class _Progress:
    key: tuple[str, int]
    num_ready: int
    done: KVDone | None


@dataclass(frozen=True, slots=True)
class _Cancel:
    transfer: OutgoingTransfer
    reason: str


class _Connection:
    """The sockets to one decode worker: the first carries all messages, the blocks go over each in turn."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, num_streams: int) -> None:
        self.streams = [dealer(context, address) for _ in range(num_streams)]
        self.used_at = time.monotonic()
        self.num_transfers = 0
        self.shared: bool | None = None  # as the last grant said


class KVSender:
    """`open`, `progress` and `cancel` are called by the engine's thread only; `on_ended` is called on the sender's."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        block_view: Callable[[int], memoryview],
        block_bytes: int,
        hello: tuple[str, int, str],
        on_ended: Callable[[TransferEnded], None],
        *,
        lease_s: float,
        num_streams: int,
        memory: KVMemory | None = None,
        require_shared: bool = False,
    ) -> None:
        """`memory` is offered to every decode worker; with `require_shared` one that cannot read it gets nothing."""
        self._context, self._block_view, self._on_ended = context, block_view, on_ended
        self._worker_id, self._epoch, self._fingerprint = hello
        self._lease_s, self._num_streams = lease_s, num_streams
        self._memory, self._require_shared = memory, require_shared
        self._batch = blocks_per_message(block_bytes)
        self._commands: SimpleQueue[OutgoingTransfer | _Progress | _Cancel | None] = SimpleQueue()
        address = f"inproc://kv-sender-{id(self)}"
        self._wake_in = context.socket(zmq.PULL)
        self._wake_in.bind(address)
        self._wake_out = context.socket(zmq.PUSH)
        self._wake_out.set(zmq.LINGER, 0)
        self._wake_out.connect(address)
        self._lent: dict[tuple[str, int], OutgoingTransfer] = {}  # the engine's view: opened and not cancelled
        self._lock = threading.Lock()  # held while blocks are read
        self._connections: dict[str, _Connection] = {}
        self._transfers: dict[tuple[str, int], OutgoingTransfer] = {}
        self._unopened: dict[tuple[str, int], None] = {}
        self._poller = zmq.Poller()
        self._poller.register(self._wake_in, zmq.POLLIN)
        self.num_bytes = 0
        self.num_dropped_frames = 0
        self.failure: BaseException | None = None
        self._block_bytes = block_bytes
        self._thread = threading.Thread(target=self._main, name="kv-sender", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 2.0) -> None:
        """End the thread and close its sockets. Call once, from the engine's thread or after it ended."""
        self._post(None)
        self._thread.join(timeout_s)
        self._wake_out.close()

    def open(self, request_id: str, attempt: int, target: KVTarget, blocks: list[int], num_ready: int) -> None:
        """Announce a prompt to its decode worker; the first `num_ready` blocks are computed already."""
        now = time.monotonic()
        until = now + self._lease_s
        transfer = OutgoingTransfer(request_id, attempt, target, tuple(blocks), now, until, num_ready=num_ready)
        self._lent[transfer.key] = transfer
        self._post(transfer)

    def progress(self, request_id: str, attempt: int, num_ready: int, done: KVDone | None = None) -> None:
        """More blocks are computed; `done` with the last ones."""
        self._post(_Progress((request_id, attempt), num_ready, done))

    def cancel(self, request_id: str, attempt: int, reason: str) -> None:
        """Take the blocks back: none is read for the wire once this returned. A live transfer fails on both sides."""
        transfer = self._lent.pop((request_id, attempt), None)
        if transfer is not None:
            with self._lock:
                transfer.revoked = True
            self._post(_Cancel(transfer, reason))

    def _post(self, command: OutgoingTransfer | _Progress | _Cancel | None) -> None:
        self._commands.put(command)
        try:
            self._wake_out.send(b"", zmq.NOBLOCK)
        except zmq.Again:
            # The pipe is full of wake-ups the thread has not read yet: it will see this command too.
            log.debug("sender wake-up coalesced")

    def _main(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:
            log.exception("KV sender died")
            self.failure = error
        finally:
            for connection in self._connections.values():
                for stream in connection.streams:
                    stream.close()
            self._wake_in.close()

    def _turn(self) -> bool:
        """One round: commands, replies, shipping, leases. False to stop."""
        for socket, _ in self._poller.poll(self._poll_timeout_ms()):
            if socket is self._wake_in:
                self._drain_wakeups()
        if not self._take_commands():
            return False
        for connection in list(self._connections.values()):
            for stream in connection.streams:
                self._receive(stream)
        self._ship()
        now = time.monotonic()
        self._announce(now)
        self._expire(now)
        return True

    def _poll_timeout_ms(self) -> int:
        now = time.monotonic()
        leases = (t.lease_until for t in self._transfers.values() if not t.computing)
        until = min(leases, default=now + ANNOUNCE_S)
        return max(0, int(min(until - now, ANNOUNCE_S) * 1000) + 1)

    def _drain_wakeups(self) -> None:
        while events(self._wake_in) & zmq.POLLIN:
            self._wake_in.recv()

    def _take_commands(self) -> bool:
        while True:
            try:
                command = self._commands.get_nowait()
            except Empty:
                return True
            match command:
                case None:
                    return False
                case OutgoingTransfer():
                    self._begin(command)
                case _Progress(key, num_ready, done):
                    if (transfer := self._transfers.get(key)) is not None:
                        now = time.monotonic()
                        transfer.num_ready, transfer.lease_until = num_ready, now + self._lease_s
                        if done is not None:
                            transfer.done, transfer.done_at = done, now
                case _Cancel(transfer, reason):
                    if self._transfers.get(transfer.key) is transfer:
                        self._tell_failed(transfer, reason)
                        self._forget(transfer)

    def _begin(self, transfer: OutgoingTransfer) -> None:
        address = transfer.target.address
        connection = self._connections.get(address)
        if connection is None:
            connection = self._connections[address] = _Connection(self._context, address, self._num_streams)
            for stream in connection.streams:
                self._poller.register(stream, zmq.POLLIN)
        connection.num_transfers += 1
        self._transfers[transfer.key] = transfer
        self._unopened[transfer.key] = None

    def _receive(self, stream: zmq.Socket[bytes]) -> None:
        while events(stream) & zmq.POLLIN:
            parts = stream.recv_multipart()
            try:
                message = decode(parts[0])
            except WireError as error:
                self._drop(str(error))
                continue
            match message:
                case KVGrant() | KVWait() | KVAck() | KVFailed():
                    self._reply(stream, message)
                case _:
                    self._drop(f"{type(message).__name__} is not for a prefill worker's KV socket")

    def _reply(self, stream: zmq.Socket[bytes], message: KVGrant | KVWait | KVAck | KVFailed) -> None:
        transfer = self._transfers.get((message.request_id, message.attempt))
        if transfer is None:
            if isinstance(message, KVGrant | KVWait):  # it holds room, or a place in a queue, for what will not come
                why = "the prefill worker holds this transfer no more"
                try_send(stream, KVFailed(request_id=message.request_id, attempt=message.attempt, reason=why))
            return
        now = time.monotonic()
        transfer.lease_until = now + self._lease_s
        match message:
            case KVGrant():
                self._on_grant(transfer, message, now)
            case KVAck():
                self._end(transfer, "")
            case KVFailed(reason=reason):
                self._end(transfer, f"the decode worker gave up: {reason}")

    def _on_grant(self, transfer: OutgoingTransfer, grant: KVGrant, now: float) -> None:
        if grant.shared and self._memory is None:
            self._drop(f"grant for shared memory that was not offered for {transfer.request_id}")
        elif self._require_shared and not grant.shared:
            why = f"decode worker {transfer.target.worker_id} cannot read this worker's memory, and kv_transport is shm"
            self._tell_failed(transfer, why)
            self._end(transfer, why)
        elif not transfer.grant(grant.first_block, now, shared=grant.shared):
            self._drop(f"grant from block {grant.first_block} of {len(transfer.blocks)} for {transfer.request_id}")
        else:
            connection = self._connections[transfer.target.address]
            if connection.shared is not grant.shared:
                connection.shared = grant.shared
                log.info(
                    "KV to %s goes %s",
                    transfer.target.worker_id,
                    "through shared memory" if grant.shared else "over TCP",
                )

    def _ship(self) -> None:
        """Give every transfer a message at a time until all are drained or their sockets are full."""
        blocked: set[zmq.Socket[bytes]] = set()
        for key in list(self._unopened):
            transfer = self._transfers[key]
            if try_send(self._streams(transfer)[0], self._open_message(transfer)):
                del self._unopened[key]
            else:
                blocked.add(self._streams(transfer)[0])
        active = [t for t in self._transfers.values() if t.shippable(1) or t.can_finish]
        while active:
            active = [transfer for transfer in active if self._ship_one(transfer, blocked)]
            if events(self._wake_in) & zmq.POLLIN:
                break
        for connection in self._connections.values():
            for stream in connection.streams:
                self._poller.modify(stream, zmq.POLLIN | (zmq.POLLOUT if stream in blocked else 0))

    def _ship_one(self, transfer: OutgoingTransfer, blocked: set[zmq.Socket[bytes]]) -> bool:
        """Send the transfer's next message; True when it has more to send and its socket takes more."""
        streams = self._streams(transfer)
        indices = transfer.shippable(self._batch)
        if indices:
            stream = streams[transfer.stream % len(streams)]
            if not events(stream) & zmq.POLLOUT:  # looked at first: a view may cost a copy off a device
                blocked.add(stream)
                return False
            blocks = [transfer.blocks[index] for index in indices]
            views = [self._block_view(block) for block in blocks]
            sources = blocks if transfer.shared else ()
            with self._lock:
                if transfer.revoked:
                    return False
                sent = try_send_blocks(stream, *transfer.key, indices.start, views, sources)
            if not sent:
                blocked.add(stream)
                return False
            transfer.next_block, transfer.stream = indices.stop, transfer.stream + 1
            transfer.lease_until = time.monotonic() + self._lease_s
            self.num_bytes += len(indices) * self._block_bytes
            return bool(transfer.shippable(1)) or transfer.can_finish
        if transfer.can_finish and transfer.done is not None:
            if try_send(streams[0], transfer.done):
                transfer.done_sent = True
            else:
                blocked.add(streams[0])
        return False

    def _announce(self, now: float) -> None:
        """Keep alive what decode workers reserved for prompts that wait for their turn to be computed."""
        for transfer in self._transfers.values():
            if transfer.computing and transfer.announced_at < now - ANNOUNCE_S:
                transfer.announced_at = now
                try_send(self._streams(transfer)[0], self._open_message(transfer))

    def _expire(self, now: float) -> None:
        for transfer in [t for t in self._transfers.values() if t.lease_until < now and not t.computing]:
            self._tell_failed(transfer, "lease expired")
            self._end(transfer, f"decode worker {transfer.target.worker_id} was silent for {self._lease_s:g} s")
        idle = [
            address
            for address, connection in self._connections.items()
            if connection.num_transfers == 0 and connection.used_at < now - IDLE_CONNECTION_S
        ]
        for address in idle:
            for stream in self._connections.pop(address).streams:
                self._poller.unregister(stream)
                stream.close()

    def _tell_failed(self, transfer: OutgoingTransfer, reason: str) -> None:
        message = KVFailed(request_id=transfer.request_id, attempt=transfer.attempt, reason=reason[:1000])
        if transfer.key not in self._unopened:
            try_send(
                self._streams(transfer)[0], message
            )  # a full queue loses it: the receiver has a deadline of its own

    def _end(self, transfer: OutgoingTransfer, reason: str) -> None:
        self._forget(transfer)
        now = time.monotonic()
        granted_at = transfer.granted_at or now
        num_shipped = (transfer.next_block or transfer.first_block) - transfer.first_block
        self._on_ended(
            TransferEnded(
                transfer.request_id,
                transfer.attempt,
                reason,
                num_shipped,
                transfer.first_block,
                granted_at - transfer.opened_at,
                now - granted_at,
                now - transfer.done_at if transfer.done_at else 0.0,
                transfer.shared,
            )
        )

    def _forget(self, transfer: OutgoingTransfer) -> None:
        del self._transfers[transfer.key]
        self._unopened.pop(transfer.key, None)
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
            num_blocks=len(transfer.blocks),
            sent_at=time.monotonic(),
            memory=self._memory,
        )

    def _drop(self, why: str) -> None:
        self.num_dropped_frames += 1
        log.warning("dropped a KV frame: %s", why)
