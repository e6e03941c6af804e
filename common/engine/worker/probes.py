"""HTTP server for a worker's `/health`, `/ready` and `/metrics`, in the worker's own event loop.

A worker whose loop is blocked does not answer, so that a liveness probe detects it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from common.wire import listen

PROBE_BACKLOG = 128
"""Maximum number of connections waiting to be accepted."""
ANSWER_S = 10.0
"""Maximum time, in seconds, that a connection may stay open without a completed response."""
MAX_CONNECTIONS = 256
"""Maximum number of connections. Beyond it, the one that was answered longest ago is closed, so that probes get in."""
MAX_REQUEST_BYTES = 16 * 1024
"""Maximum size of a probe request: a line and some headers."""


@dataclass(frozen=True)
class ProbeStatus:
    """`healthy`: no restart needed. `ready`: may receive requests. Both responses contain `detail`, as JSON."""

    ready: bool
    healthy: bool
    detail: dict[str, object] = field(default_factory=dict)


class _Connection(HttpToolsProtocol):
    """uvicorn connection with limits on time and size, which uvicorn does not have."""

    def __init__(self, **of_uvicorn: Any) -> None:
        super().__init__(**of_uvicorn)
        self.answered_at = self.loop.time()
        self._num_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:  # probes must always get in
            others = (other for other in self.connections if isinstance(other, _Connection) and other is not self)
            min(others, key=lambda other: other.answered_at).cut()

    def data_received(self, data: bytes) -> None:
        self._num_bytes += len(data)
        if self._num_bytes > MAX_REQUEST_BYTES:
            self.cut()
        else:
            super().data_received(data)

    def on_response_complete(self) -> None:
        self.answered_at, self._num_bytes = self.loop.time(), 0
        super().on_response_complete()

    def cut(self) -> None:
        self.connections.discard(self)
        self.transport.abort()


class _QuietServer(uvicorn.Server):
    """uvicorn server without signal handlers; the worker handles signals. `listening` is set after startup."""

    def __init__(self, config: uvicorn.Config, answer_s: float) -> None:
        super().__init__(config)
        self._answer_s = answer_s
        self.listening = asyncio.Event()

    async def on_tick(self, counter: int) -> bool:
        now = asyncio.get_running_loop().time()
        for connection in list(self.server_state.connections):
            if isinstance(connection, _Connection) and now - connection.answered_at > self._answer_s:
                connection.cut()
        return await super().on_tick(counter)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class WorkerHTTP:
    """HTTP server of one worker. `status` is called for every probe and must be fast."""

    def __init__(
        self,
        host: str,
        port: int,
        status: Callable[[], ProbeStatus],
        registry: CollectorRegistry,
        *,
        answer_s: float = ANSWER_S,
    ) -> None:
        self._host, self._port, self._status, self._registry = host, port, status, registry
        self._answer_s = answer_s
        self._server: _QuietServer | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> int:
        """Start listening and return the bound port. Raises OSError."""
        listener = listen(self._host, self._port, PROBE_BACKLOG)
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
                loop="none",  # runs in the worker's loop
                http=_Connection,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="error",  # otherwise uvicorn logs each invalid request
                access_log=False,
                timeout_graceful_shutdown=1,
            ),
            self._answer_s,
        )
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]), name="worker-http")
        await self._server.listening.wait()
        return int(listener.getsockname()[1])

    async def stop(self) -> None:
        """Close the port and open connections. Idempotent; may be called without `start`."""
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


def _answer(good: bool, status: ProbeStatus) -> Response:
    body = {"ready": status.ready, "healthy": status.healthy} | status.detail
    return Response(json.dumps(body, default=str), status_code=200 if good else 503, media_type="application/json")
