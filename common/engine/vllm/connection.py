"""TCP connections between the hosts of a worker, and the choice of their network interface for gloo and NCCL."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
import sys
from pathlib import Path

from common.engine.ranks import Channel
from common.errors import RankLost

LOST_S = 15
"""Seconds without any packet from the other host's kernel after which a connection is cut.

The kernel of a frozen process still answers; waits for a process have separate deadlines.
"""
IDLE_S, PROBE_S = 5, 2
DIAL_S = 5.0
SIOCGIFADDR = 0x8915
"""Linux ioctl: IPv4 address of an interface, in the 16 bytes after its name."""
NAME_BYTES, ADDRESS = 16, slice(20, 24)
IPV6_ADDRESSES = Path("/proc/net/if_inet6")


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT or [IPv6]:PORT."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def configured(connection: socket.socket) -> socket.socket:
    """Disable delays of small messages, set keep-alive to LOST_S, and return the connection."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, (LOST_S - IDLE_S) // PROBE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOST_S * 1000)  # for unacknowledged data
    return connection


def dial(address: str) -> Channel:
    """Connect to HOST:PORT. Raises OSError."""
    return Channel(configured(socket.create_connection(split_address(address), DIAL_S)), f"the worker at {address}")


def normalized_address(address: str) -> str:
    """Return an address in its usual form: IPv4-mapped IPv6 becomes IPv4, without scope id."""
    found = ipaddress.ip_address(address.partition("%")[0])
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return str(mapped or found)


def interface_to(host: str) -> str:
    """Return the name of the network interface to a host. Raises RankLost if there is no route or no such interface."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing: the kernel chooses the route
            source = ipaddress.ip_address(probe.getsockname()[0].partition("%")[0])
    except OSError as error:
        raise RankLost(f"no route to {host}: {error}") from error
    for _, name in socket.if_nameindex():
        if source in addresses_of(name):
            return name
    raise RankLost(
        f"no network interface has the address {source} of the route to {host}: set GLOO_SOCKET_IFNAME and "
        "NCCL_SOCKET_IFNAME to the interface"
    )


def addresses_of(interface: str) -> set[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """Return the IPv6 addresses and the first IPv4 address of an interface. Linux only."""
    found: set[ipaddress.IPv4Address | ipaddress.IPv6Address] = set()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asked = struct.pack(f"{NAME_BYTES}s240x", interface.encode())
            found.add(ipaddress.IPv4Address(fcntl.ioctl(asking, SIOCGIFADDR, asked)[ADDRESS]))
        except OSError:
            pass  # no IPv4 address
    lines = IPV6_ADDRESSES.read_text(encoding="ascii").splitlines() if IPV6_ADDRESSES.exists() else []
    found |= {ipaddress.IPv6Address(bytes.fromhex(line.split()[0])) for line in lines if line.split()[-1] == interface}
    return found
