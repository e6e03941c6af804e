"""Connection of a router to one worker: a DEALER socket that never blocks, and queues nothing while disconnected."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, cast

import zmq
import zmq.asyncio

from common.errors import WireError
from common.wire import MAX_MESSAGE_BYTES, MAX_MESSAGES_PER_TURN, WATCHED, Curve, Dialer, DropLog, decode, encode
from common.wire.messages import (
    AbortRequest,
    Message,
    ToRouter,
    WorkerHello,
)
from router.fleet.worker import worker_name

log = logging.getLogger(__name__)

MAX_UNSENT_ABORTS = 4096
"""Maximum number of aborts stored for an unreachable worker. Beyond it, the oldest is dropped."""
POLLIN: Final = int(zmq.POLLIN)
"""A plain int: operations on enum flags are slow."""
READ_S = 0.01
"""Maximum time to read messages without yielding, in seconds. Large logprobs messages take milliseconds."""
LAST_WORDS_S = 0.02
"""Time to read remaining messages after the connection broke, in seconds."""


@dataclass(frozen=True, slots=True)
class ConnectionEvents:
    """Callbacks of a connection, called with its address.

    `on_refused` also gets the reason why no connection can be made, `on_unreadable` why a frame was dropped.
    """

    on_message: Callable[[str, ToRouter], None]
    on_up: Callable[[str], None]
    on_cut: Callable[[str], None]
    on_refused: Callable[[str, str], None] = lambda address, why: None
    on_unreadable: Callable[[str, str], None] = lambda address, why: None


@dataclass(slots=True)
class ConnectionCounters:
    num_unsent: int = 0
    num_cuts: int = 0


@dataclass(slots=True)
class WorkerConnection:
    """Connection to one worker. Owns the socket; the caller runs `receive` and `watch`.

    ZeroMQ reconnects automatically, resolves the name again each time, and reports broken connections. So a killed
    worker is detected immediately and not only by its silence.

    Messages are read in the same event loop iteration in which they arrive. pyzmq's asyncio sockets would add a future,
    a timer and a task switch to each, which takes longer than forwarding a token.
    """

    address: str
    router_id: str
    events: ConnectionEvents
    hwm: int
    curve: Curve | None = None
    counters: ConnectionCounters = field(default_factory=ConnectionCounters)
    drops: DropLog = field(init=False)
    _unsent_aborts: deque[AbortRequest] = field(default_factory=lambda: deque(maxlen=MAX_UNSENT_ABORTS))
    _socket: zmq.Socket[bytes] | None = None
    _monitor: zmq.asyncio.Socket | None = None
    _receiving: asyncio.Future[None] | None = None
    _reads: bool = False
    _dialer: Dialer | None = None
    _refusal: str = ""
    _is_up: bool = False
    _name: str = field(init=False)

    def __post_init__(self) -> None:
        self._name = worker_name("", self.address)
        self.drops = DropLog(log, f"a frame from {self._name}")

    def open(self, context: zmq.asyncio.Context) -> None:
        socket = self._socket = zmq.Socket(context, zmq.DEALER)  # first, so that `close` finds it if a later call fails
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.SNDHWM, self.hwm),
            (zmq.RCVHWM, self.hwm),
            (zmq.IMMEDIATE, 1),  # nothing is queued for a worker that is not connected
            (zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES),
            (zmq.RECONNECT_IVL, 50),
            (zmq.RECONNECT_IVL_MAX, 500),
            (zmq.TCP_KEEPALIVE, 1),
            (zmq.TCP_KEEPALIVE_IDLE, 10),
            (zmq.TCP_KEEPALIVE_INTVL, 5),
            (zmq.TCP_KEEPALIVE_CNT, 3),
            (zmq.HEARTBEAT_IVL, 2000),  # ZeroMQ's own heartbeats replace a connection that died silently
            (zmq.HEARTBEAT_TIMEOUT, 10_000),
            (zmq.IPV6, 1 if "[" in self.address else 0),
        ):
            socket.setsockopt(option, value)
        socket.setsockopt(zmq.ROUTING_ID, self.router_id.encode())
        self._monitor = cast("zmq.asyncio.Socket", socket.get_monitor_socket(WATCHED))  # same kind as the context
        self._dialer = Dialer(socket, self.address, self.curve)

    def send(self, message: Message) -> bool:
        """Send without blocking. Returns False if the worker is disconnected or reads too slowly."""
        if self._socket is None or self._socket.closed:
            return False
        try:
            self._socket.send(encode(message), zmq.NOBLOCK)
        except zmq.ZMQError:
            self.counters.num_unsent += 1
            sent = False
        else:
            sent = True
        self._look_again(self._socket)
        return sent

    def abort(self, request_id: str, attempt: int) -> None:
        """Abort a request on the worker, now or when it is reachable again."""
        message = AbortRequest(request_id=request_id, attempt=attempt)
        if not self.send(message):
            self._unsent_aborts.append(message)

    def flush_aborts(self) -> None:
        while self._unsent_aborts and self.send(self._unsent_aborts[0]):
            self._unsent_aborts.popleft()

    async def receive(self) -> None:
        """Pass on messages until cancelled. Counts and drops invalid frames."""
        if self._socket is None:
            raise RuntimeError(f"the connection to {self._name} is not open")
        loop, descriptor = asyncio.get_running_loop(), self._socket.FD
        receiving = self._receiving = loop.create_future()
        loop.add_reader(descriptor, self._read)
        loop.call_soon(self._read)  # the descriptor does not signal messages that have arrived already
        try:
            await receiving
        finally:
            self._receiving = None
            loop.remove_reader(descriptor)

    async def watch(self) -> None:
        """Report when the connection is established, breaks or is refused, until cancelled. Redials after a refusal."""
        if self._monitor is None or self._dialer is None:
            raise RuntimeError(f"the connection to {self._name} is not open")
        while True:
            due_ms = (self._dialer.dial_at - time.monotonic()) * 1000
            if not await self._monitor.poll(None if due_ms == math.inf else max(0, int(due_ms) + 1)):
                self._dialer.dial()
                continue
            event = self._dialer.on_event(await self._monitor.recv_multipart(), time.monotonic())
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._is_up = True
                self.events.on_up(self.address)
            elif event == zmq.EVENT_DISCONNECTED and self._is_up:
                self._is_up = False
                self.counters.num_cuts += 1
                await asyncio.sleep(LAST_WORDS_S)
                self.events.on_cut(self.address)
            self._log_refusal(self._dialer.refusal)

    def close(self, linger_ms: int) -> None:
        """Close the socket. Queued messages are sent for up to `linger_ms`."""
        if self._socket is not None:
            self._socket.disable_monitor()
            self._socket.close(linger=linger_ms)
        if self._monitor is not None:
            self._monitor.close(linger=0)
        self._socket = self._monitor = None

    def _read(self) -> None:
        """Pass on available messages. An error ends `receive`, which raises it."""
        socket, receiving = self._socket, self._receiving
        if socket is None or receiving is None or receiving.done():
            return
        self._reads, began = True, time.monotonic()
        try:
            for _ in range(MAX_MESSAGES_PER_TURN):
                if not _has_message(socket):
                    return
                message = self._parse(socket.recv_multipart(zmq.NOBLOCK))
                if message is not None:
                    if isinstance(message, WorkerHello):
                        self._name = worker_name(message.worker_id, self.address)
                        self.drops.what = f"a frame from {self._name}"
                    self.events.on_message(self.address, message)
                if receiving.done():  # the message made the caller close this connection
                    return
                if time.monotonic() - began > READ_S:
                    break
            receiving.get_loop().call_soon(self._read)
        except Exception as error:
            if not receiving.done():
                receiving.set_exception(error)
        finally:
            self._reads = False

    def _look_again(self, socket: zmq.Socket[bytes]) -> None:
        """Schedule a read if messages are available.

        A send consumes ZeroMQ's signal for a message, so the descriptor would report it only with the next one.
        """
        receiving = self._receiving
        if receiving is None or self._reads:  # `_read` checks after each message
            return
        if _has_message(socket):
            receiving.get_loop().call_soon(self._read)

    def _log_refusal(self, refusal: str) -> None:
        if refusal == self._refusal:
            return
        self._refusal = refusal
        if refusal:
            log.error("%s: connection refused: %s", self._name, refusal)
            self.events.on_refused(self.address, refusal)

    def _parse(self, parts: list[bytes]) -> ToRouter | None:
        try:
            if len(parts) != 1:
                raise WireError(f"{len(parts)} parts instead of 1")
            message = decode(parts[0])
            if not isinstance(message, ToRouter):
                raise WireError(f"unexpected {type(message).__name__} message")
        except WireError as error:
            self.drops.add(str(error), time.monotonic())
            self.events.on_unreadable(self.address, str(error))
            return None
        return message


def _has_message(socket: zmq.Socket[bytes]) -> bool:
    """Return whether a message is available. After False, ZeroMQ's descriptor signals the next one."""
    return bool(cast(int, socket.get(zmq.EVENTS)) & POLLIN)
