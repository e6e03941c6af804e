"""A text that costs much to create, for endpoints that anyone may request at any rate."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

REUSED_BYTES = 256 * 1024
REUSE_S = 1.0
"""Time, in seconds, for which a text above REUSED_BYTES is returned again."""


class SharedText:
    """Creates one text at a time. Concurrent requests share it. Owned by one event loop."""

    def __init__(
        self,
        create: Callable[[], Awaitable[bytes]],
        reuse_s: float = REUSE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._create, self._reuse_s, self._clock = create, reuse_s, clock
        self._creating: asyncio.Task[bytes] | None = None
        self._text, self._expires_at = b"", float("-inf")

    async def get(self) -> bytes:
        """Return the text: a new one, unless one is being created or the latest one is large and recent."""
        if self._clock() < self._expires_at:
            return self._text
        if self._creating is None:
            self._creating = asyncio.create_task(self._created(), name="create a text")
        return await asyncio.shield(self._creating)  # the others still need it if this client disconnects

    async def _created(self) -> bytes:
        try:
            text = await self._create()
        finally:
            self._creating = None
        if len(text) > REUSED_BYTES:
            self._text, self._expires_at = text, self._clock() + self._reuse_s
        return text
