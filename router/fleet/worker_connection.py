"""A router's connection to one worker: a DEALER socket that never blocks, and queues nothing while it is down."""

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
from common.wire import MAX_IN_A_ROW, MAX_MESSAGE_BYTES, WATCHED, Curve, Dialer, DropLog, decode, encode
from common.wire.messages import AbortRequest, Message, ToRouter

log = logging.getLogger(__name__)

MAX_UNSENT_ABORTS = 4096
"""Aborts that are kept for a worker that cannot take them now; beyond, the oldest is dropped."""
POLLIN: Final = int(zmq.POLLIN)
"""A plain number: to look at flags of an enum takes as long as to ask for them."""
READ_S = 0.01
"""Time to read messages in a row. One with the log-probabilities of many rows takes milliseconds."""
LAST_WORDS_S = 0.02
"""Time to read what a worker sent before its connection broke."""


@dataclass(frozen=True, slots=True)
class ConnectionEvents:
    """What a connection tells its owner, with its address.

    `on_refused` adds why no connection can be made, `on_unreadable` why a frame was dropped.
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
    """Owns the socket; the caller runs its two loops, `receive` and `watch`.

    ZeroMQ reconnects by itself, looks the name up again each time, and reports a broken connection. So a killed worker
    is noticed at once, and not only by its silence.

    Messages are read in the turn of the event loop in which they are there: with pyzmq's own asyncio sockets each one
    would cost a future, a timer and a turn of the task that awaits it, more than it takes to pass on a token.
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

    def __post_init__(self) -> None:
        self.drops = DropLog(log, f"a frame from {self.address}")

    def open(self, context: zmq.asyncio.Context) -> None:
        socket = self._socket = zmq.Socket(context, zmq.DEALER)  # set first: `close` must find it whatever fails next
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
            (zmq.HEARTBEAT_IVL, 2000),  # ZeroMQ's own heartbeats replace a connection that died without a word
            (zmq.HEARTBEAT_TIMEOUT, 10_000),
            (zmq.IPV6, 1 if "[" in self.address else 0),
        ):
            socket.setsockopt(option, value)
        socket.setsockopt(zmq.ROUTING_ID, self.router_id.encode())
        self._monitor = cast("zmq.asyncio.Socket", socket.get_monitor_socket(WATCHED))  # of the context's kind
        self._dialer = Dialer(socket, self.address, self.curve)

    def send(self, message: Message) -> bool:
        """Send now or not at all: False when the worker is not connected or reads too slowly."""
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
        """Have the worker forget a request, now or when it can be reached again."""
        message = AbortRequest(request_id=request_id, attempt=attempt)
        if not self.send(message):
            self._unsent_aborts.append(message)

    def flush_aborts(self) -> None:
        while self._unsent_aborts and self.send(self._unsent_aborts[0]):
            self._unsent_aborts.popleft()

    async def receive(self) -> None:
        """Pass messages on until cancelled. Frames that are no message of a worker are counted and dropped."""
        if self._socket is None:
            raise RuntimeError(f"{self.address} is not open")
        loop, descriptor = asyncio.get_running_loop(), self._socket.FD
        receiving = self._receiving = loop.create_future()
        loop.add_reader(descriptor, self._read)
        loop.call_soon(self._read)  # the descriptor does not tell of what is there already
        try:
            await receiving
        finally:
            self._receiving = None
            loop.remove_reader(descriptor)

    async def watch(self) -> None:
        """Report when the connection comes up, breaks or is refused, until cancelled; dial again after a refusal."""
        if self._monitor is None or self._dialer is None:
            raise RuntimeError(f"{self.address} is not open")
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
            self._tell_refusal(self._dialer.refusal)

    def close(self, linger_ms: int) -> None:
        """Close the socket; queued messages have `linger_ms` to leave."""
        if self._socket is not None:
            self._socket.disable_monitor()
            self._socket.close(linger=linger_ms)
        if self._monitor is not None:
            self._monitor.close(linger=0)
        self._socket = self._monitor = None

    def _read(self) -> None:
        """Pass on the messages that are there. An error ends `receive`, which raises it."""
        socket, receiving = self._socket, self._receiving
        if socket is None or receiving is None or receiving.done():
            return
        self._reads, began = True, time.monotonic()
        try:
            for _ in range(MAX_IN_A_ROW):
                if not _has_message(socket):
                    return
                message = self._parse(socket.recv_multipart(zmq.NOBLOCK))
                if message is not None:
                    self.events.on_message(self.address, message)
                if receiving.done():  # the message made the caller leave this worker
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
        """Read soon if there is something: a send takes ZeroMQ's signal of a message away, and the descriptor with it
        tells of none until the next one comes."""
        receiving = self._receiving
        if receiving is None or self._reads:  # `_read` looks after each message by itself
            return
        if _has_message(socket):
            receiving.get_loop().call_soon(self._read)

    def _tell_refusal(self, refusal: str) -> None:
        if refusal == self._refusal:
            return
        self._refusal = refusal
        if refusal:
            log.error("worker %s cannot be talked to: %s", self.address, refusal)
            self.events.on_refused(self.address, refusal)

    def _parse(self, parts: list[bytes]) -> ToRouter | None:
        try:
            if len(parts) != 1:
                raise WireError(f"{len(parts)} parts instead of 1")
            message = decode(parts[0])
            if not isinstance(message, ToRouter):
                raise WireError(f"a {type(message).__name__} is not for routers")
        except WireError as error:
            self.drops.add(str(error), time.monotonic())
            self.events.on_unreadable(self.address, str(error))
            return None
        return message


def _has_message(socket: zmq.Socket[bytes]) -> bool:
    """Whether a message is there. ZeroMQ's descriptor tells of the next one once this has said no."""
    return bool(cast(int, socket.get(zmq.EVENTS)) & POLLIN)
