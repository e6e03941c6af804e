"""Accepts TLS connections, with a bound on the handshakes under way.

    listener ─> accepted ─> handshake within timeout_s, or cut off by newer ones ─> a connection like any other

asyncio's own servers bound no handshakes, so that silent clients can hold every descriptor.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable

log = logging.getLogger(__name__)

MAX_ACCEPTED_IN_A_ROW = 64
"""Connections accepted in a row before other tasks run; an accept that is ready does not yield."""
RETRY_S = 0.1
"""The pause after a failed accept, which most likely lacked a descriptor."""


class Handshakes:
    """Runs at most `most` handshakes at once; a newer one cuts off the oldest, and `on_cut` is called."""

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
        """Accept until cancelled, which cancels the handshakes under way too."""
        try:
            while True:
                for _ in range(MAX_ACCEPTED_IN_A_ROW):
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
        """Shut the connection down; its handshake then fails and closes it."""
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
        except OSError as error:  # of TLS, a timeout or the connection; the loop has closed the socket
            log.debug("no handshake: %s", error)
        finally:
            self._under_way.pop(accepted, None)
