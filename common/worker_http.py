"""A worker's `/health`, `/ready` and `/metrics`, served inside the worker's own event loop.

A worker whose loop stands still does not answer here either: that is what a liveness probe is for.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import uvicorn
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

BACKLOG = 128


@dataclass(frozen=True)
class WorkerStatus:
    """`healthy`: restarting would not help. `ready`: may get requests. `detail` is shown with either, as JSON."""

    ready: bool
    healthy: bool
    detail: dict[str, object] = field(default_factory=dict)


class _QuietServer(uvicorn.Server):
    """uvicorn without signal handlers: the worker decides when it ends. `listening` is set once it answers."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class WorkerHTTP:
    """The small HTTP server of one worker. `status` is called for every probe and must be quick."""

    def __init__(self, host: str, port: int, status: Callable[[], WorkerStatus], registry: CollectorRegistry) -> None:
        self._host, self._port, self._status, self._registry = host, port, status, registry
        self._server: _QuietServer | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> int:
        """Listens and returns the port, which differs from the one asked for when that was 0. Raises OSError."""
        listener = _listen(self._host, self._port)
        app = Starlette(
            routes=[
                Route("/health", self._health),
                Route("/ready", self._ready),
                Route("/metrics", self._metrics),
            ]
        )
        self._server = _QuietServer(
            uvicorn.Config(
                app,
                loop="none",  # the worker's loop runs already
                lifespan="off",
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=1,
            )
        )
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]), name="worker-http")
        await self._server.listening.wait()
        return int(listener.getsockname()[1])

    async def stop(self) -> None:
        """Closes the port and open connections. May be called twice, or without `start`."""
        if self._server is None or self._task is None:
            return
        self._server.should_exit = True
        await self._task
        self._server = self._task = None

    async def _health(self, request: Request) -> Response:
        status = self._status()
        return _answer(status.healthy, status)

    async def _ready(self, request: Request) -> Response:
        status = self._status()
        return _answer(status.ready and status.healthy, status)

    async def _metrics(self, request: Request) -> Response:
        return Response(generate_latest(self._registry), headers={"content-type": CONTENT_TYPE_LATEST})


def _listen(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def _answer(good: bool, status: WorkerStatus) -> Response:
    body = {"ready": status.ready, "healthy": status.healthy} | status.detail
    return Response(json.dumps(body, default=str), status_code=200 if good else 503, media_type="application/json")
