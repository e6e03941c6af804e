"""Binding and connecting ZeroMQ sockets, with deadlines for handshakes and CURVE.

`Dialer` determines why the other side rejects connections, which ZeroMQ does not. After a failed handshake, ZeroMQ
retries forever with the same key, although another key may be right. If the process there uses another mechanism or no
ZeroMQ, it abandons the address, although the next process there may be right. It also abandons an established
connection that it closed because of a malformed frame or one above `MAXMSGSIZE`. It reconnects only if the other side
or the network closed the connection.

Pure except for the socket: `now` is passed in.
"""

from __future__ import annotations

import errno
import math
import socket as sockets
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from common.wire.curve import AnySocket, Curve
from common.wire.listening import in_url, listening_host

HANDSHAKE_MS = 10_000
"""Timeout of handshakes in milliseconds. A pending connection occupies a descriptor."""
BACKLOG = 1024
"""Maximum number of peer connections that wait to be accepted: a whole fleet connecting at once."""
NEXT_KEY_S = 0.1
"""Delay between two keys, in seconds. ZeroMQ has reported all events of the first one by then."""
RETRY_S = 0.5
"""Delay between two rounds of connection attempts, in seconds."""
ROUNDS = 3
"""Failures of every key before this counts as a rejection. A process that is ending also breaks handshakes."""
CERTAIN_S = 10.0
"""Time after a certain reason during which a presumed one does not replace it, in seconds. Their order varies."""
_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
WATCHED = zmq.EVENT_HANDSHAKE_SUCCEEDED | _FAILED | zmq.EVENT_DISCONNECTED
"""Monitor events processed by `on_event`."""

MAX_SOCKETS = 16_384
"""Limit of sockets in the context of a process that sends KV. Each stream to another worker takes three."""


def allow_many_sockets(context: zmq.Context[Any]) -> None:
    """Raise a context's limit from 1,023 sockets, which suffice for 341 streams. Call it before the first socket."""
    context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)


def bind(
    socket: AnySocket, host: str, port: int, curve: Curve | None = None, listener: sockets.socket | None = None
) -> str:
    """Bind to host:port (0 selects a free port) and return the full address.

    With `curve`, only trusted keys can connect.

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
    """Manages a socket's single connection. `refusal` is the reason why there is none, "" if unknown.

    Workers do not announce their keys, so all trusted keys are tried, beginning with the last successful one.
    """

    def __init__(self, socket: AnySocket, address: str, curve: Curve | None = None) -> None:
        """Raises zmq.ZMQError for an invalid address."""
        self._socket, self._address, self._curve = socket, address, curve
        self._key = b""
        self._tried: set[bytes] = set()
        self._is_up = self._tries_again = False
        self._num_failed = 0  # consecutive
        self._certain_at = -math.inf
        self.refusal = ""
        self.dial_at = math.inf
        """Time of the next `dial`, after `on_event` has processed earlier events."""
        self.dial()

    @property
    def is_up(self) -> bool:
        """Whether the handshake has succeeded and the connection still stands."""
        return self._is_up

    def on_event(self, parts: list[bytes], now: float) -> int:
        """Process a message of the socket's monitor. Returns the event's number."""
        message = parse_monitor_message(parts)
        event = int(message["event"])
        is_up, self._is_up = self._is_up, event == zmq.EVENT_HANDSHAKE_SUCCEEDED
        if self._is_up:
            self.refusal, self._num_failed, self._certain_at = "", 0, -math.inf
            self.dial_at = math.inf
            self._tried.clear()
        elif is_up:
            self.dial_at = now + RETRY_S  # unless ZeroMQ reconnects before
        elif self.dial_at == math.inf:  # a failed handshake that is not being handled yet
            self._on_failure(event, int(message["value"]), now)
        return event

    def dial(self) -> None:
        """Connect. Call at `dial_at`."""
        self.dial_at = math.inf
        self._hang_up()  # ZeroMQ ignores a second connection to the same address
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
            self.refusal = "every handshake fails"
            if self._curve is not None:
                keys = f"the {self._num_keys} keys trusted by this process"
                self.refusal += f": its key may not be among {keys}, or it does not use CURVE"
        if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL and self._curve is None:
            self._tries_again = True  # ZeroMQ retries: the other side closed the connection
            return
        self._hang_up()
        self.dial_at = now + (RETRY_S if certain or self._mark_tried() else NEXT_KEY_S)

    def _hang_up(self) -> None:
        """Drop the connection and stop ZeroMQ's own retries."""
        try:
            self._socket.disconnect(self._address)
        except zmq.ZMQError as error:
            if error.errno != errno.ENOENT:  # ENOENT: there is none, or ZeroMQ abandoned it
                raise

    def _certain_reason(self, event: int, value: int) -> str:
        """Return the reason that a failure proves, or ""."""
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return "it does not authorise this process's public key"
        if event != zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            return ""
        if value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
            if self._curve is None:
                return "it requires CURVE, but this process has no --curve-key"
            return "it does not use CURVE, but this process has a --curve-key"
        return f"the process there is not a worker (ZeroMQ protocol error {value:#x})" if self._curve is None else ""

    def _mark_tried(self) -> bool:
        """Mark the current key as tried. Returns whether all keys were tried, after which the first is next."""
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
