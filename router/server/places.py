"""The places that a server has for connections, and which connection makes room for a new one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Places:
    """At most `most` transports. One that rests, because nothing is answered there, makes room; the longest rest first.

    It is aborted, not closed: a TLS peer that never says goodbye would keep its descriptor for half a minute. So one
    whose last answer is still on its way is left alone.
    """

    def __init__(self, most: int, on_evicted: Callable[[], None]) -> None:
        self.most, self._on_evicted = most, on_evicted
        self._open: set[asyncio.Transport] = set()
        self._resting: dict[asyncio.Transport, None] = {}

    def enter(self, transport: asyncio.Transport) -> bool:
        """A connection was made; it rests. False: there is no place for it. Either way it must `leave`."""
        self._open.add(transport)
        while len(self._open) > self.most and self._evict():
            pass
        self._resting[transport] = None
        return len(self._open) <= self.most

    def work(self, transport: asyncio.Transport) -> None:
        """A request came: nothing takes its place from now on."""
        self._resting.pop(transport, None)

    def rest(self, transport: asyncio.Transport) -> None:
        """All that was asked is answered; the connection may already be closing."""
        if transport in self._open:
            self._resting[transport] = None

    def leave(self, transport: asyncio.Transport) -> None:
        """The connection is lost."""
        self._open.discard(transport)
        self._resting.pop(transport, None)

    def _evict(self) -> bool:
        for transport in self._resting:
            if not transport.get_write_buffer_size():
                self.leave(transport)
                transport.abort()
                self._on_evicted()
                return True
        return False
