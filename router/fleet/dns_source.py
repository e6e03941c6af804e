"""DNS source: looks up host names (HOST:PORT) periodically. Each address is one worker."""

from __future__ import annotations

import asyncio
import ipaddress
import random
import socket
import time
from collections.abc import Awaitable, Callable, Mapping

from common.wire import Role
from router.fleet.discovery import DiscoveryStatus, Endpoint, Publish

LOOKUP_TIMEOUT_S = 5.0
"""Time that one round waits for its lookups, in seconds."""

Resolve = Callable[[str, int], Awaitable[list[str]]]


async def resolve(host: str, port: int) -> list[str]:
    """Resolve a host without blocking the event loop. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


class DNSSource:
    """Publishes the addresses of all names until cancelled.

    A name that cannot be resolved keeps its addresses; a dead worker is detected by its connection. IPv4 is used for
    names with addresses of both families, because each worker would be listed twice otherwise.
    """

    def __init__(
        self,
        names: Mapping[str, Role],
        publish: Publish,
        *,
        interval_s: float,
        resolve: Resolve = resolve,
        timeout_s: float = LOOKUP_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.status = DiscoveryStatus("dns", names, clock())
        self._publish, self._resolve, self._clock = publish, resolve, clock
        self._interval_s, self._timeout_s = interval_s, timeout_s
        self._known: dict[str, tuple[str, ...]] = {}
        self._pending: dict[str, asyncio.Future[list[str]]] = {}

    async def run(self) -> None:
        """Look up and publish until cancelled."""
        try:
            while True:
                await self._round()
                await asyncio.sleep(self._interval_s * (0.9 + random.random() / 5))
        finally:
            for task in self._pending.values():
                task.cancel()

    async def _round(self) -> None:
        """Look up every name. A stalled lookup stays pending and is not repeated."""
        for name in self.status.services:
            if name not in self._pending:
                host, _, port = name.rpartition(":")
                self._pending[name] = asyncio.ensure_future(self._resolve(host.strip("[]"), int(port)))
        await asyncio.wait(self._pending.values(), timeout=self._timeout_s)
        problems = [problem for name in self.status.services if (problem := self._take(name))]
        if self._known:
            self._publish_endpoints()
        if problems:
            self.status.failed("; ".join(problems), self._clock())
        else:
            self.status.synced(self._clock())

    def _take(self, name: str) -> str:
        """Store the addresses of a finished lookup. Returns why there are none, or ""."""
        task = self._pending[name]
        if not task.done():
            return f"{name}: no answer within {self._timeout_s:g} s"
        del self._pending[name]
        try:
            self._known[name] = _addresses(task.result(), name.rpartition(":")[2])
        except (OSError, UnicodeError) as error:
            return f"{name}: {getattr(error, 'strerror', None) or error}"
        return ""

    def _publish_endpoints(self) -> None:
        found = {
            address: Endpoint(role, address)
            for name, role in self.status.services.items()
            for address in self._known.get(name, ())
        }
        endpoints = tuple(sorted(found.values()))
        if endpoints != self.status.endpoints:
            self.status.published(endpoints)
            self._publish(endpoints)


def _addresses(hosts: list[str], port: str) -> tuple[str, ...]:
    ips = {ipaddress.ip_address(host.partition("%")[0]) for host in hosts}
    chosen = {ip for ip in ips if ip.version == 4} or ips
    return tuple(sorted(f"tcp://[{ip}]:{port}" if ip.version == 6 else f"tcp://{ip}:{port}" for ip in chosen))
