"""The network interface by which a host reaches another: what gloo and NCCL are told to use."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

from common.errors import RankLost

SIOCGIFADDR = 0x8915
"""Linux: the IPv4 address of an interface, in the 16 bytes behind its name."""
NAME_BYTES, ADDRESS = 16, slice(20, 24)
IPV6_ADDRESSES = Path("/proc/net/if_inet6")


def interface_to(host: str) -> str:
    """Its name. Raises RankLost where there is no route, or where the address of the route is no interface's own."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing: the kernel chooses the route
            source = ipaddress.ip_address(probe.getsockname()[0].partition("%")[0])
    except OSError as error:
        raise RankLost(f"there is no route to {host}: {error}") from error
    for _, name in socket.if_nameindex():
        if source in addresses_of(name):
            return name
    raise RankLost(
        f"no network interface has {source}, the address of the route to {host}: name the interface in "
        "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
    )


def addresses_of(interface: str) -> set[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """Its IPv6 addresses and its first of IPv4, on Linux."""
    found: set[ipaddress.IPv4Address | ipaddress.IPv6Address] = set()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asked = struct.pack(f"{NAME_BYTES}s240x", interface.encode())
            found.add(ipaddress.IPv4Address(fcntl.ioctl(asking, SIOCGIFADDR, asked)[ADDRESS]))
        except OSError:
            pass  # it has none
    lines = IPV6_ADDRESSES.read_text(encoding="ascii").splitlines() if IPV6_ADDRESSES.exists() else []
    found |= {ipaddress.IPv6Address(bytes.fromhex(line.split()[0])) for line in lines if line.split()[-1] == interface}
    return found
