"""Serves the other processes of a router at a Unix socket."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import uvicorn
from starlette.applications import Starlette

if TYPE_CHECKING:  # only routers of several processes need its HTTP client
    from router.siblings import Siblings

UVICORN_CLOSE_S = 1
"""How long uvicorn waits for connections that are left, at either door, after the drain."""
STARTED_POLL_S = 0.01
"""Between two looks whether uvicorn has started."""


class _Server(uvicorn.Server):
    """uvicorn without signal handlers of its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class InnerServer:
    """`start`, serve, `close`."""

    def __init__(self, app: Starlette, siblings: Siblings) -> None:
        self._siblings = siblings
        config = uvicorn.Config(
            app,
            uds=str(siblings.part.own_socket),
            loop="none",  # the event loop runs already
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=UVICORN_CLOSE_S,
        )
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Take over from the process before, and listen. Raises OSError."""
        self._siblings.ledger.take_over()
        self._siblings.part.own_socket.unlink(missing_ok=True)
        self._task = asyncio.create_task(self._server.serve(), name="inner http")
        while not self._server.started and not self._task.done():  # noqa: ASYNC110 (uvicorn has no event for it)
            await asyncio.sleep(STARTED_POLL_S)
        if self._task.done():
            self._task.result()

    async def close(self) -> None:
        """Answer no more."""
        self._server.should_exit = True
        if self._task is not None:
            await self._task
        await self._siblings.close()
