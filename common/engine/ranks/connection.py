"""TCP connections between the hosts of one worker: made within a deadline, and cut when the other host is silent."""

from __future__ import annotations

import ipaddress
import socket
import sys

from common.engine.ranks.channel import Channel

LOST_S = 15
"""After so many seconds without a sign of life of the other host's kernel a connection is cut.

A frozen process is no silent host: its kernel answers. What waits for it has deadlines of its own.
"""
IDLE_S, PROBE_S = 5, 2
DIAL_S = 5.0


def split_address(address: str) -> tuple[str, int]:
    """Host and port of HOST:PORT or [IPv6]:PORT."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def tuned(connection: socket.socket) -> socket.socket:
    """The same, without delays for small messages, and with LOST_S for a silent host."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, (LOST_S - IDLE_S) // PROBE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOST_S * 1000)  # of what was sent
    return connection


def dial(address: str) -> Channel:
    """A connection to HOST:PORT, whose name is looked up. Raises OSError."""
    return Channel(tuned(socket.create_connection(split_address(address), DIAL_S)), f"rank 0 at {address}")


def plain_address(address: str) -> str:
    """An address as others write it: IPv4 on a socket of both families without its prefix."""
    found = ipaddress.ip_address(address.partition("%")[0])
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return str(mapped or found)
