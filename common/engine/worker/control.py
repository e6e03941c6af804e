"""Worker side of the control channel: one ROUTER socket that any number of routers connect to.

router ── RouterHello ──> worker          worker ── WorkerHello, then WorkerHeartbeat ... ──> router
router ── RouterHeartbeat, PrefillRequest or DecodeRequest, AbortRequest ──> worker
          (a router without a hello gets a WorkerHello with `lost_router`)
worker ── TokenOutput, RequestFailed ──> router
worker ── BlockEvents, before a heartbeat ──> router      router ── BlockSnapshotRequest ──> worker ── BlockSnapshot ...
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import zmq
import zmq.asyncio
from msgspec.structs import replace

from common.engine.kv import BlockLog
from common.errors import WireError
from common.wire import MAX_MESSAGES_PER_TURN, Curve, DropLog, bind, decode, encode, inherited
from common.wire.messages import (
    OLDEST_PROTOCOL_VERSION,
    PROTOCOL_VERSION,
    AnyMessage,
    BlockSnapshotRequest,
    Message,
    RouterHeartbeat,
    RouterHello,
    ToWorker,
    WorkerHeartbeat,
    WorkerHello,
    common_version,
    version_names,
)

log = logging.getLogger(__name__)
CONTROL_HWM = 100_000
"""Messages queued to and from one router. If the queue is full, the router no longer reads."""
MAX_ROUTERS = 1024
"""Maximum number of routers, larger than any cluster has. Bounds the state that a flood of hellos can create."""
CUT_BEATS = 2
"""Consecutive heartbeats without a connection after which a router is lost. It dropped its requests at the cut."""


@dataclass(slots=True)
class RouterPeer:
    """Router that has sent a hello."""

    router_id: str
    epoch: int
    last_heard: float
    changes_roles: bool = False
    protocol: int = 0
    num_cut: int = 0
    """Consecutive heartbeats without a connection."""
    wants_snapshot: bool = False
    """Whether it has requested all blocks of the prefix cache since the last heartbeat."""
    has_stayed: bool = False
    """Whether it sent anything after its hello. A router of several models only queries which model is served here."""


class ControlServer:
    """Control socket of the worker. All methods run on one event loop, except `send_threadsafe`.

    `heartbeat(router)` returns the heartbeat for a router. `on_message(router, message)` is called for each request and
    abort. `on_router_lost(router)` is called when a router was silent for `router_timeout_s`, lost its connection, or
    restarted as a new process. `blocks()` returns the log of the prefix cache, which changes with the role.
    """

    def __init__(
        self,
        socket: zmq.asyncio.Socket,
        hello: Callable[[], WorkerHello],
        heartbeat: Callable[[bytes], WorkerHeartbeat],
        on_message: Callable[[bytes, AnyMessage], None],
        on_router_lost: Callable[[bytes], None],
        *,
        heartbeat_s: float,
        router_timeout_s: float,
        blocks: Callable[[], BlockLog] | None = None,
    ) -> None:
        no_blocks = BlockLog()
        self._socket, self._blocks = socket, blocks or (lambda: no_blocks)
        self._hello, self._heartbeat = hello, heartbeat
        self._on_message, self._on_router_lost = on_message, on_router_lost
        self._heartbeat_s, self._router_timeout_s = heartbeat_s, router_timeout_s
        self._routers: dict[bytes, RouterPeer] = {}
        self._notified: set[bytes] = set()
        self._loop = asyncio.get_running_loop()
        self._drops = DropLog(log, "a control frame")
        self.num_unsent = 0

    @property
    def num_routers(self) -> int:
        return len(self._routers)

    @property
    def planner(self) -> str:
        """ID of the router that may change roles: the lowest of those with role changes enabled; "" if none.

        Routers do not communicate with each other, so workers select one.
        """
        return min((peer.router_id for peer in self._routers.values() if peer.changes_roles), default="")

    @property
    def num_dropped_frames(self) -> int:
        return self._drops.num_dropped

    async def run(self) -> None:
        """Run until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._receive())
            tasks.create_task(self._beat())

    def send(self, router: bytes, message: Message) -> int:
        """Queue a message for a router. Returns 0, or the errno if the router is gone or its queue is full."""
        future = self._socket.send_multipart([router, encode(message)], zmq.NOBLOCK)
        sent = cast("asyncio.Future[object]", future)
        # With NOBLOCK the future completes at once: ROUTER rejects peers that are gone or past the high-water mark.
        if sent.done() and (error := sent.exception()) is not None:
            self.num_unsent += 1
            log.debug("message to router not sent: %s", error)
            return error.errno or 0 if isinstance(error, zmq.ZMQError) else 0
        return 0

    def broadcast(self, message: Message, protocol: int) -> None:
        """Queue a message for every router that speaks this protocol version."""
        for router, peer in self._routers.items():
            if peer.protocol >= protocol:
                self.send(router, message)

    def send_threadsafe(self, messages: list[tuple[bytes, Message]]) -> None:
        """Call `send` for each message, in order. Callable from any thread. Does nothing after the loop is closed."""
        try:
            self._loop.call_soon_threadsafe(self._send_all, messages)
        except RuntimeError:
            self.num_unsent += len(messages)

    def broadcast_heartbeat(self) -> None:
        """Send every router a heartbeat, preceded by changes of the prefix cache or by a requested snapshot."""
        blocks = self._blocks()
        events = blocks.take()
        for router, peer in self._routers.items():
            wanted, peer.wants_snapshot = peer.wants_snapshot, False
            for message in blocks.snapshot() if wanted else events:
                self.send(router, message)
            is_cut = self.send(router, self._heartbeat(router)) == zmq.EHOSTUNREACH
            peer.num_cut = peer.num_cut + 1 if is_cut else 0

    def broadcast_hello(self) -> None:
        """Send every router another hello, after the model was loaded or the role changed."""
        for router in self._routers:
            self.send(router, self._hello())
            self.send(router, self._heartbeat(router))

    def _send_all(self, messages: list[tuple[bytes, Message]]) -> None:
        for router, message in messages:
            self.send(router, message)

    async def _receive(self) -> None:
        num_in_a_row = 0
        while True:
            self._take(await self._socket.recv_multipart(), time.monotonic())
            num_in_a_row += 1
            if num_in_a_row >= MAX_MESSAGES_PER_TURN:
                num_in_a_row = 0
                await asyncio.sleep(0)

    def _take(self, parts: list[bytes], now: float) -> None:
        try:
            if len(parts) != 2:
                raise WireError(f"{len(parts)} parts instead of 2")
            self._dispatch(parts[0], decode(parts[1]), now)
        except WireError as error:
            self._drops.add(str(error), now)

    def _dispatch(self, router: bytes, message: AnyMessage, now: float) -> None:
        peer = self._routers.get(router)
        if isinstance(message, RouterHello):
            self._greet(router, peer, message, now)
        elif peer is None:
            self._notify_stranger(router, message)
            raise WireError(f"{type(message).__name__} before RouterHello")
        elif not isinstance(message, ToWorker):
            raise WireError(f"unexpected {type(message).__name__}")
        else:
            peer.last_heard, peer.has_stayed = now, True
            if isinstance(message, BlockSnapshotRequest):
                peer.wants_snapshot = message.epoch == self._blocks().epoch
            elif not isinstance(message, RouterHeartbeat):
                self._on_message(router, message)

    def _notify_stranger(self, router: bytes, message: AnyMessage) -> None:
        """Notify a router without a hello that this worker does not have it; at most once per heartbeat."""
        if isinstance(message, ToWorker) and router not in self._notified and len(self._notified) < MAX_ROUTERS:
            self._notified.add(router)
            self.send(router, replace(self._hello(), lost_router=True))

    def _greet(self, router: bytes, peer: RouterPeer | None, message: RouterHello, now: float) -> None:
        oldest, newest = message.oldest_protocol, message.protocol or message.oldest_protocol
        if not common_version(oldest, newest):
            log.warning(
                "rejected router %s: it speaks protocol %s, this worker %s: upgrade one release at a time",
                message.router_id,
                version_names(oldest, newest),
                version_names(OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION),
            )
            self.send(router, self._hello())
            return
        if peer is None and len(self._routers) >= MAX_ROUTERS:
            raise WireError(f"too many routers (limit {MAX_ROUTERS})")
        if peer is not None and peer.epoch != message.epoch:
            self._on_router_lost(router)
        if peer is None:
            log.info("router %s connected", message.router_id)
        self._routers[router] = RouterPeer(message.router_id, message.epoch, now, message.changes_roles, newest)
        self.send(router, self._hello())
        self.send(router, self._heartbeat(router))

    def _lose(self, router: bytes, peer: RouterPeer, why: str) -> None:
        if peer.has_stayed:
            log.warning("router %s lost (%s): ending its requests", peer.router_id, why)
        else:
            log.info("router %s disconnected after its hello", peer.router_id)
        del self._routers[router]
        self._on_router_lost(router)

    async def _beat(self) -> None:
        while True:
            self.broadcast_heartbeat()
            self._notified.clear()
            now = time.monotonic()
            self._drops.flush(now)
            deadline = now - self._router_timeout_s
            for router, peer in list(self._routers.items()):
                if peer.last_heard < deadline:
                    self._lose(router, peer, f"silent for {self._router_timeout_s:g} s")
                elif peer.num_cut >= CUT_BEATS:
                    self._lose(router, peer, "disconnected")
            await asyncio.sleep(self._heartbeat_s)


def bind_control(
    context: zmq.asyncio.Context, host: str, port: int, curve: Curve | None = None
) -> tuple[zmq.asyncio.Socket, str]:
    """Bind the control socket, on the parent process's listener if any, and return it with its address.

    Raises zmq.ZMQError if the port is in use.
    """
    socket = context.socket(zmq.ROUTER)
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.SNDHWM, CONTROL_HWM)
    socket.set(zmq.RCVHWM, CONTROL_HWM)
    socket.set(zmq.MAXMSGSIZE, 32 * 1024 * 1024)
    socket.set(zmq.ROUTER_HANDOVER, 1)
    socket.set(zmq.ROUTER_MANDATORY, 1)
    return socket, bind(socket, host, port, curve, inherited())
