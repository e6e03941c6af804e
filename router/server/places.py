"""Bounds the number of open connections: an idle connection makes room for a new one."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable

IDLE_S = 1.0
"""Idle time, in seconds, after which a connection may be evicted. New clients need some time to send a request, and
others may send their next one."""
MAX_REFUSED = 64
"""Maximum number of refused connections that stay open until their clients have read the refusal."""


class Places:
    """At most `most` transports. To make room, `enter` evicts the one that has been idle longest.

    It aborts that one instead of closing it, because a TLS peer that does not answer the close would keep the
    descriptor for half a minute. A connection whose last answer is not sent yet is therefore not evicted.
    """

    def __init__(self, most: int, on_evicted: Callable[[], None], clock: Callable[[], float]) -> None:
        """`clock` returns seconds."""
        self.most, self._on_evicted, self._clock = most, on_evicted, clock
        self._open: set[asyncio.Transport] = set()
        self._idle: OrderedDict[asyncio.Transport, float] = OrderedDict()
        """Start of each connection's idle time, in the order of eviction."""
        self._refused: dict[asyncio.Transport, None] = {}

    def enter(self, transport: asyncio.Transport) -> bool:
        """Add a new, idle connection. If it returns False, all slots are in use, and the caller must refuse it.

        In both cases, `leave` must be called when the connection ends.
        """
        if len(self._open) >= self.most and not self._evict():
            self._refused[transport] = None
            if len(self._refused) > MAX_REFUSED:
                oldest = next(iter(self._refused))
                self.leave(oldest)
                oldest.abort()
            return False
        self._open.add(transport)
        self._idle[transport] = self._clock()
        return True

    def work(self, transport: asyncio.Transport) -> None:
        """A request came on this connection, which protects it from eviction."""
        self._idle.pop(transport, None)

    def rest(self, transport: asyncio.Transport) -> None:
        """Every request of this connection is answered; it may already be closing."""
        if transport in self._open:
            self._idle[transport] = self._clock()
            if transport.is_closing():  # eviction loses nothing
                self._idle[transport] = 0.0
                self._idle.move_to_end(transport, last=False)

    def leave(self, transport: asyncio.Transport) -> None:
        """Remove a lost connection."""
        self._open.discard(transport)
        self._idle.pop(transport, None)
        self._refused.pop(transport, None)

    def _evict(self) -> bool:
        latest = self._clock() - IDLE_S
        for transport, since in self._idle.items():
            if since > latest:
                return False
            if not transport.get_write_buffer_size():
                self.leave(transport)
                transport.abort()
                self._on_evicted()
                return True
        return False
