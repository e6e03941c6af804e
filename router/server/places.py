"""Bounds the number of open connections: an idle connection makes room for a new one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Places:
    """At most `most` transports. To make room, `enter` evicts the one that has been idle longest.

    It aborts that one instead of closing it, because a TLS peer that does not answer the close would keep the
    descriptor for half a minute. A connection whose last answer is not sent yet is therefore not evicted.
    """

    def __init__(self, most: int, on_evicted: Callable[[], None]) -> None:
        self.most, self._on_evicted = most, on_evicted
        self._open: set[asyncio.Transport] = set()
        self._idle: dict[asyncio.Transport, None] = {}

    def enter(self, transport: asyncio.Transport) -> bool:
        """Add a new, idle connection. False: there is no place for it. In both cases it must `leave` at its end."""
        self._open.add(transport)
        while len(self._open) > self.most and self._evict():
            pass
        self._idle[transport] = None
        return len(self._open) <= self.most

    def work(self, transport: asyncio.Transport) -> None:
        """A request came on this connection, which protects it from eviction."""
        self._idle.pop(transport, None)

    def rest(self, transport: asyncio.Transport) -> None:
        """Every request of this connection is answered; it may already be closing."""
        if transport in self._open:
            self._idle[transport] = None

    def leave(self, transport: asyncio.Transport) -> None:
        """Remove a lost connection."""
        self._open.discard(transport)
        self._idle.pop(transport, None)

    def _evict(self) -> bool:
        for transport in self._idle:
            if not transport.get_write_buffer_size():
                self.leave(transport)
                transport.abort()
                self._on_evicted()
                return True
        return False
