"""Listening addresses for IPv4 and IPv6. `::` means all addresses of both."""

from __future__ import annotations

import os
import socket
import stat
from functools import cache

ALL, ALL_IPV4 = "::", "0.0.0.0"
CLIENTS_BACKLOG = 2048
"""Maximum number of client connections that wait to be accepted in a burst. The kernel may limit it further."""


def in_url(host: str) -> str:
    """Format a host for a URL or ZeroMQ address: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host else host


@cache
def has_ipv6() -> bool:
    """Return whether IPv6 is available. Containers on nodes with IPv6 disabled do not have it."""
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind((ALL, 0))
    except OSError:
        return False
    return True


def listening_host(host: str, *, ipv6: bool | None = None) -> str:
    """Return `host`, or all IPv4 addresses instead of `::` without IPv6."""
    if host != ALL:
        return host
    return ALL if (has_ipv6() if ipv6 is None else ipv6) else ALL_IPV4


def inherited() -> socket.socket | None:
    """Return the listener that the parent process passes as standard input, as inetd does, or None.

    The parent keeps a copy, so that no other program can bind the port while this process restarts.
    """
    try:
        if not stat.S_ISSOCK(os.fstat(0).st_mode):
            return None
        given = socket.socket(fileno=os.dup(0))
    except OSError:  # no standard input
        return None
    try:
        listens = given.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError:
        listens = 0
    if not listens:
        given.close()
        return None
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # child processes must not inherit it
    os.close(nothing)
    return given


def listen(host: str, port: int, backlog: int, *, shared: bool = False) -> socket.socket:
    """Create a listening socket.

    `shared`: other sockets of this user may listen on the same port and share connections.

    Raises OSError if the address is in use or does not belong to this machine.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(listening_host(host), port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(host != ALL))
        listener.bind(address)
        listener.listen(backlog)  # immediately, because two bound sockets may share a port
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener
