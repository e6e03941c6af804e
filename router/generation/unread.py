"""A bound on the bytes that this process holds for clients that read slower than tokens come."""

from __future__ import annotations

from typing import Protocol

from common.errors import RETRY_AFTER_S, RequestError, Unavailable

MAX_UNREAD_BYTES = 256 * 1024 * 1024
"""A million tokens with 20 log-probabilities each, or six million without."""


class Reader(Protocol):
    """An answer whose client reads it."""

    def give_up(self, error: RequestError) -> None:
        """Drop what waits for the client, and send the error instead."""


class UnreadBudget:
    """Owned by the event loop. Over the bound, it gives up the answer that holds most."""

    def __init__(self, most: int = MAX_UNREAD_BYTES) -> None:
        self._most = most
        self._held: dict[Reader, int] = {}
        self.num_bytes = 0

    def hold(self, reader: Reader, num_bytes: int) -> None:
        """`num_bytes` of an answer wait for its client now."""
        self.num_bytes += num_bytes - self._held.pop(reader, 0)
        if num_bytes:
            self._held[reader] = num_bytes
        if self.num_bytes > self._most:
            slowest = max(self._held, key=self._held.__getitem__)
            held = self._held[slowest]
            error = Unavailable(
                f"the client reads too slowly: {held:,} bytes of its answer wait for it, of {self.num_bytes:,} in "
                f"all, and this router holds {self._most:,}",
                retry_after_s=RETRY_AFTER_S,
            )
            self.hold(slowest, 0)
            slowest.give_up(error)
