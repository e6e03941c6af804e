"""Binds a socket that others connect to: handshakes have a deadline, and CURVE admits trusted keys only."""

from __future__ import annotations

import socket as sockets

import zmq

from common.wire.curve import AnySocket, Curve
from common.wire.listening import in_url, listening_host

HANDSHAKE_MS = 10_000
"""A connection without a complete handshake is cut off by then: until then it costs a descriptor."""
BACKLOG = 1024
"""Peers whose connections wait to be accepted: a whole fleet that dials at once."""


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
