"""A bound on what answers of this process hold for clients that read slower than tokens come."""

from __future__ import annotations

from typing import Protocol

from common.errors import RequestError, Unavailable

MAX_UNREAD_BYTES = 256 * 1024 * 1024
"""A million tokens with 20 log-probabilities each, or six million without."""
RETRY_AFTER_S = 1.0


class Reader(Protocol):
    """An answer on its way to its client."""

    def give_up(self, error: RequestError) -> None:
        """Drop what waits for the client, who is to be told the error instead."""


class UnreadBudget:
    """Owned by the event loop. Over the bound, the answer that holds most is given up."""

    def __init__(self, most: int = MAX_UNREAD_BYTES) -> None:
        self._most = most
        self._held: dict[Reader, int] = {}
        self.num_bytes = 0

    def hold(self, reader: Reader, num_bytes: int) -> None:
        """So much of an answer waits for its client now."""
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
