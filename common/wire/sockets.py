"""Binds sockets that others connect to, and connects sockets to an address.

Handshakes at a bound socket have a deadline, and CURVE admits trusted keys only. A dialer finds out why the other side
refuses it.

After a failed handshake ZeroMQ itself either retries for ever with the same key, though another key may be right, or
gives the address up: for a process that speaks another mechanism or no ZeroMQ at all, though the next process at that
address may be right. It also gives up an established connection that it closes itself because of a frame that is
malformed or larger than `MAXMSGSIZE`; it reconnects only after the other side or the network closed the connection.
Pure but for the socket: `now` comes in.
"""

from __future__ import annotations

import errno
import math
import socket as sockets

import zmq
from zmq.utils.monitor import parse_monitor_message

from common.wire.curve import AnySocket, Curve
from common.wire.listening import in_url, listening_host

HANDSHAKE_MS = 10_000
"""A connection without a complete handshake is cut off by then: until then it costs a descriptor."""
BACKLOG = 1024
"""Peers whose connections wait to be accepted: a whole fleet that dials at once."""
NEXT_KEY_S = 0.1
"""Between two keys: ZeroMQ has reported all events of the first one by then."""
RETRY_S = 0.5
"""Between two rounds of dialling."""
ROUNDS = 3
"""How often every key must fail before that counts as a refusal: a process that ends breaks handshakes off too."""
CERTAIN_S = 10.0
"""For so long after a certain reason a presumed one does not replace it. Either may come first."""
_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
WATCHED = zmq.EVENT_HANDSHAKE_SUCCEEDED | _FAILED | zmq.EVENT_DISCONNECTED
"""The monitor events that `on_event` wants."""


def bind(
    socket: AnySocket, host: str, port: int, curve: Curve | None = None, listener: sockets.socket | None = None
) -> str:
    """Bind to host:port (0 selects a free port) and return the full address. `curve` admits trusted keys only.

    With a `listener`, the ZeroMQ socket uses it instead of a new one, and takes ownership.
    """
    if curve is not None:
        curve.serve(socket)
    socket.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.set(zmq.BACKLOG, BACKLOG)
    host = listening_host(host)
    if ":" in host:
        socket.set(zmq.IPV6, 1)
    if listener is not None:
        port = listener.getsockname()[1]
        socket.set(zmq.USE_FD, listener.detach())
    socket.bind(f"tcp://{in_url(host)}:{port or '*'}")
    return socket.get_string(zmq.LAST_ENDPOINT)


class Dialer:
    """Owns the socket's one connection. `refusal` says why there is none, "" while there is no reason.

    A worker does not say which key it has, so the dialer tries each trusted key, first the one that was right before.
    """

    def __init__(self, socket: AnySocket, address: str, curve: Curve | None = None) -> None:
        """Raises zmq.ZMQError for a bad address."""
        self._socket, self._address, self._curve = socket, address, curve
        self._key = b""
        self._tried: set[bytes] = set()
        self._is_up = self._tries_again = False
        self._num_failed = 0  # in a row
        self._certain_at = -math.inf
        self.refusal = ""
        self.dial_at = math.inf
        """When `dial` is due, once `on_event` got the monitor's events up to then."""
        self.dial()

    def on_event(self, parts: list[bytes], now: float) -> int:
        """Process a message of the socket's monitor; returns the event's number."""
        message = parse_monitor_message(parts)
        event = int(message["event"])
        is_up, self._is_up = self._is_up, event == zmq.EVENT_HANDSHAKE_SUCCEEDED
        if self._is_up:
            self.refusal, self._num_failed, self._certain_at = "", 0, -math.inf
            self.dial_at = math.inf
            self._tried.clear()
        elif is_up:
            self.dial_at = now + RETRY_S  # unless ZeroMQ reconnects before
        elif self.dial_at == math.inf:  # a broken handshake, not yet given up
            self._on_failure(event, int(message["value"]), now)
        return event

    def dial(self) -> None:
        """Connect, once `dial_at` has come."""
        self.dial_at = math.inf
        self._hang_up()  # else ZeroMQ ignores a second connection to the same address
        if self._curve is not None:
            self._key = self._next_key(self._curve)
            self._curve.expect(self._socket, self._key)
        self._socket.connect(self._address)

    def _next_key(self, curve: Curve) -> bytes:
        keys = list(curve.trusted())
        if self._key in keys and self._key not in self._tried:
            return self._key
        return next((key for key in keys if key not in self._tried), keys[0])

    def _on_failure(self, event: int, value: int, now: float) -> None:
        if self._tries_again and event == zmq.EVENT_DISCONNECTED:
            self._tries_again = False
            return
        self._num_failed += 1
        certain = self._certain_reason(event, value)
        if certain:
            self.refusal, self._certain_at = certain, now
        elif self._num_failed > ROUNDS * self._num_keys and now - self._certain_at > CERTAIN_S:
            self.refusal = "it breaks every handshake off"
            if self._curve is not None:
                keys = f"the {self._num_keys} that this process trusts"
                self.refusal += f": its key may be none of {keys}, or it speaks no CURVE at all"
        if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL and self._curve is None:
            self._tries_again = True  # ZeroMQ retries by itself: the other side went away
            return
        self._hang_up()
        self.dial_at = now + (RETRY_S if certain or self._mark_tried() else NEXT_KEY_S)

    def _hang_up(self) -> None:
        """Drop the connection and end ZeroMQ's own attempts to make it."""
        try:
            self._socket.disconnect(self._address)
        except zmq.ZMQError as error:
            if error.errno != errno.ENOENT:  # ENOENT: there is none, or ZeroMQ gave it up itself
                raise

    def _certain_reason(self, event: int, value: int) -> str:
        """The reason that a failure proves, or ""."""
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return "it does not authorise this process's public key"
        if event != zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            return ""
        if value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
            if self._curve is None:
                return "it wants CURVE, and this process was given no --curve-key"
            return "it speaks no CURVE, and this process was given a --curve-key"
        return f"the process there is no worker (ZeroMQ's protocol error {value:#x})" if self._curve is None else ""

    def _mark_tried(self) -> bool:
        """Count the present key as tried; whether that was the last one, after which the first is next."""
        if self._curve is None:
            return True
        self._tried.add(self._key)
        if any(key not in self._tried for key in self._curve.trusted()):
            return False
        self._tried.clear()
        return True

    @property
    def _num_keys(self) -> int:
        return 1 if self._curve is None else len(self._curve.trusted())
