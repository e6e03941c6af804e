"""A router's connection to one worker: a DEALER socket that never blocks, and queues nothing while it is down."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import zmq
import zmq.asyncio

from common.errors import WireError
from common.wire.codec import MAX_IN_A_ROW, decode, encode
from common.wire.curve import Curve
from common.wire.dialer import WATCHED, Dialer
from common.wire.drop_log import DropLog
from common.wire.message_fields import MAX_MESSAGE_BYTES
from common.wire.messages import AbortRequest, Message, ToRouter

log = logging.getLogger(__name__)

MAX_UNSENT_ABORTS = 4096
"""Aborts that are kept for a worker that cannot take them now; beyond, the oldest is dropped."""
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
    """

    address: str
    router_id: str
    events: ConnectionEvents
    hwm: int
    curve: Curve | None = None
    counters: ConnectionCounters = field(default_factory=ConnectionCounters)
    drops: DropLog = field(init=False)
    _unsent_aborts: deque[AbortRequest] = field(default_factory=lambda: deque(maxlen=MAX_UNSENT_ABORTS))
    _socket: zmq.asyncio.Socket | None = None
    _monitor: zmq.asyncio.Socket | None = None
    _dialer: Dialer | None = None
    _refusal: str = ""
    _is_up: bool = False

    def __post_init__(self) -> None:
        self.drops = DropLog(log, f"a frame from {self.address}")

    def open(self, context: zmq.asyncio.Context) -> None:
        socket = self._socket = context.socket(zmq.DEALER)  # set first: `close` must find it whatever fails next
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
        self._monitor = socket.get_monitor_socket(WATCHED)
        self._dialer = Dialer(socket, self.address, self.curve)

    def send(self, message: Message) -> bool:
        """Send now or not at all: False when the worker is not connected or reads too slowly."""
        if self._socket is None or self._socket.closed:
            return False
        # The asyncio socket's send, not the plain one: it looks for messages whose wake-up this call swallowed.
        sent = cast("asyncio.Future[object]", self._socket.send(encode(message), zmq.NOBLOCK))
        error = sent.exception()  # a send that may not block is settled when it returns
        if error is None:
            return True
        if not isinstance(error, zmq.ZMQError):
            raise error
        self.counters.num_unsent += 1
        return False

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
        num_in_a_row = 0
        while True:
            parts = await self._socket.recv_multipart()
            message = self._parse(parts)
            if message is not None:
                self.events.on_message(self.address, message)
            num_in_a_row += 1
            if num_in_a_row >= MAX_IN_A_ROW:
                num_in_a_row = 0
                await asyncio.sleep(0)

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
