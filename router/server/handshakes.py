"""Accepts TLS connections, with a bound on those that have not shaken hands yet.

    listener ─> accepted ─> handshake within timeout_s, or cut off by newer ones ─> a connection like any other

asyncio's own servers start a handshake for whoever connects: silent ones held every descriptor, and honest clients got
none.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable

log = logging.getLogger(__name__)

BURST = 64
"""Connections accepted in a row before other tasks get a turn; a ready accept does not yield by itself."""
RETRY_S = 0.1
"""After an accept that failed, most likely for want of a descriptor."""


class Handshakes:
    """At most `most` at once; for a newer one the oldest is cut off, of which `on_cut` is told."""

    def __init__(
        self,
        listener: socket.socket,
        tls: ssl.SSLContext,
        protocol: Callable[[], asyncio.Protocol],
        *,
        most: int,
        timeout_s: float,
        on_cut: Callable[[], None],
    ) -> None:
        self._listener, self._tls, self._protocol = listener, tls, protocol
        self._most, self._timeout_s, self._on_cut = most, timeout_s, on_cut
        self._under_way: dict[socket.socket, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Accept until cancelled; what is under way then ends too."""
        try:
            while True:
                for _ in range(BURST):
                    await self._accept()
                await asyncio.sleep(0)
        finally:
            for task in self._under_way.values():
                task.cancel()
            self._listener.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            accepted, _ = await loop.sock_accept(self._listener)
        except OSError as error:
            log.debug("no connection was accepted: %s", error)
            await asyncio.sleep(RETRY_S)
            return
        while len(self._under_way) >= self._most:
            self._cut(next(iter(self._under_way)))
        self._under_way[accepted] = loop.create_task(self._shake(accepted), name="TLS handshake")

    def _cut(self, oldest: socket.socket) -> None:
        """Its handshake finds the end of the connection, and closes it."""
        del self._under_way[oldest]
        self._on_cut()
        with contextlib.suppress(OSError):
            oldest.shutdown(socket.SHUT_RDWR)

    async def _shake(self, accepted: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(
                self._protocol, accepted, ssl=self._tls, ssl_handshake_timeout=self._timeout_s
            )
        except OSError as error:  # of TLS, of time or of the connection: the loop has closed it
            log.debug("no handshake: %s", error)
        finally:
            self._under_way.pop(accepted, None)
