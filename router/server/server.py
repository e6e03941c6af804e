"""Runs the application until a signal, and gives running answers time to complete.

SIGTERM ─> /ready 503, new requests 503 ─> running answers get drain_timeout_s ─> the rest end with an error event
SIGHUP ──> the router reads keys and certificate again, and reopens the audit log
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import uvicorn
from fastapi import FastAPI

from common.config import RouterConfig, is_loopback
from common.wire import CLIENTS_BACKLOG, listening
from router.api import inner_app
from router.api.responses import KeptResponses
from router.fleet import MAX_DISCOVERED
from router.generation import SEND_GRACE_S, Service
from router.server.catch_up import POLL_S, catch_up
from router.server.handshakes import Handshakes
from router.server.http_connection import HTTPBounds, HTTPConnection
from router.server.inner_server import UVICORN_CLOSE_S, InnerServer
from router.server.places import Places

if TYPE_CHECKING:  # loaded with a store
    from router.api.batches import KeptBatches

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 75
"""Longer than clients and balancers keep idle connections: they close them first, and no request meets a close."""
TICKS_A_CHECK = 10
"""uvicorn ticks ten times a second; the server checks each connection once a second, a tenth of them at a tick: to
look at ten thousand at once holds tokens up for milliseconds."""
OTHER_FILES = 256
"""Descriptors for everything but clients and workers: files, libraries."""
FILES_A_WORKER = 8
"""The connection and the wake-ups of three sockets, twice while a new connection replaces an old one."""


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, in whose backlog early clients wait. Raises OSError when the address cannot be bound."""
    return listening.listen(host, port, CLIENTS_BACKLOG)


class Server(uvicorn.Server):
    """uvicorn with bounded connections, and without signal handlers of its own."""

    def __init__(self, service: Service, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._service, settings, self._metrics = service, service.config, service.metrics
        reject = service.metrics.count_rejected
        places = Places(connections_possible(settings), lambda: reject("evicted"), time.monotonic)
        answer_s = settings.request_timeout_s + SEND_GRACE_S
        self._bounds = HTTPBounds(places, settings.header_timeout_s, answer_s, reject)
        certificate = service.gate.certificate
        self._tls: ssl.SSLContext | None = None if certificate is None else certificate.context
        self._accepting: list[asyncio.Task[None]] = []
        self._listed: list[asyncio.Protocol] = []  # the connections of the present second

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on `sockets`."""
        loop = asyncio.get_running_loop()
        self._service.is_loopback = all(is_loopback(each.getsockname()[0]) for each in sockets or ())
        await self.lifespan.startup()
        if self._tls is None:
            self.servers = [
                await loop.create_server(self._connection, sock=each, backlog=CLIENTS_BACKLOG) for each in sockets or ()
            ]
        else:
            self.servers = []
            for each in sockets or ():
                self._shake_hands(each, self._tls)
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.stop_listening()
        await super().shutdown(sockets)

    def stop_listening(self) -> None:
        """Accept no more connections; open ones stay."""
        for server in self.servers:
            server.close()
        for task in self._accepting:
            task.cancel()

    def _shake_hands(self, listener: socket.socket, tls: ssl.SSLContext) -> None:
        bounds = self._bounds
        handshakes = Handshakes(
            listener,
            tls,
            self._connection,
            most=bounds.places.most,
            timeout_s=bounds.header_timeout_s,
            on_cut=lambda: bounds.on_reject("handshake"),
        )
        task = asyncio.create_task(handshakes.run(), name="accept")
        task.add_done_callback(self._on_accepting_ended)
        self._accepting.append(task)

    def _on_accepting_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            log.critical("connections are no longer accepted: the router ends", exc_info=task.exception())
            self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        turn = counter % TICKS_A_CHECK
        if turn == 0:
            self._listed = list(self.server_state.connections)
            self._metrics.connections.set(len(self._listed))
        self._check(self._listed[turn::TICKS_A_CHECK])
        return await super().on_tick(counter)

    def check_connections(self) -> None:
        """End all connections that kept the server waiting too long."""
        self._check(list(self.server_state.connections))

    def _check(self, connections: Iterable[asyncio.Protocol]) -> None:
        now = asyncio.get_running_loop().time()
        for connection in connections:
            assert isinstance(connection, HTTPConnection)
            connection.check(now)

    def _connection(self) -> HTTPConnection:
        return HTTPConnection(
            self._bounds, config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def stop_on_signals() -> asyncio.Event:
    """An event that SIGINT or SIGTERM sets; the second signal ends the process at once."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, _on_signal, stop)
    return stop


async def serve(
    app: FastAPI, listener: socket.socket, close: Callable[[], Awaitable[None]], stop: asyncio.Event
) -> None:
    """Serve on `listener` until `stop` is set. `close` ends the app's client after the drain."""
    service: Service = app.state.service
    kept: KeptResponses = app.state.responses
    batches: KeptBatches | None = app.state.batches
    allow_files(service.config)
    inner = (
        None if service.siblings is None else InnerServer(inner_app(service, kept, service.siblings), service.siblings)
    )
    if inner is not None:
        await inner.start()
    if service.gate.reloads:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, service.gate.reload)
    if service.siblings is not None:
        await catch_up(service, service.siblings, stop)
    server = server_of(app)
    running = asyncio.create_task(server.serve(sockets=[listener]), name="http")
    stopping = asyncio.create_task(stop.wait(), name="stop")
    watching = asyncio.create_task(service.gate.watch(), name="watch")
    if batches is not None:
        batches.start()
    await asyncio.wait((running, stopping, watching), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    try:
        if batches is not None:
            batches.drain()
        await _drain(service)
        if batches is not None:
            await batches.stop()
        await kept.stop()
        await close()
        server.should_exit = True
        await running
    finally:
        if inner is not None:
            await inner.close()
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        if batches is not None:
            await batches.close()
        await kept.close()
        await asyncio.to_thread(service.gate.close)
    if watching.done() and not watching.cancelled():
        watching.result()  # it ends only by a bug: raise it


def server_of(app: FastAPI) -> Server:
    """The server of an application from `build_app`."""
    config = uvicorn.Config(
        app,
        loop="none",  # the event loop runs already
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=CLIENTS_BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=UVICORN_CLOSE_S,
    )
    config.load()
    server = Server(app.state.service, config)
    server.lifespan = config.lifespan_class(config)
    return server


def files_needed(config: RouterConfig) -> int:
    """Descriptors for the allowed number of clients, as many TLS handshakes, and the most workers."""
    return _files_a_connection(config) * config.max_connections + _other_files(config)


def connections_possible(config: RouterConfig) -> int:
    """How many connections are allowed and have a descriptor; without one a client would get no answer at all."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return config.max_connections
    files = max(soft - _other_files(config), soft // 2)
    return max(1, min(config.max_connections, files // _files_a_connection(config)))


def allow_files(config: RouterConfig) -> None:
    """Raise the soft limit of open files as far as needed, and log it; log a warning if the hard limit is too low."""
    needed = files_needed(config)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    possible = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if possible > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (possible, hard))
        log.info("limit of open files raised", extra={"files": possible, "before": soft})
    if possible < needed:
        said = {"files": possible, "wanted": needed, "connections": connections_possible(config)}
        log.warning("fewer open files than connections allowed", extra=said)


def _files_a_connection(config: RouterConfig) -> int:
    return 2 if config.tls_cert else 1


def _other_files(config: RouterConfig) -> int:
    static = len(config.prefill) + len(config.decode)
    num_workers = static if config.discovery == "static" else MAX_DISCOVERED
    return FILES_A_WORKER * num_workers + OTHER_FILES


async def _drain(service: Service) -> None:
    """Refuse new requests, and wait for the running ones."""
    service.draining = True
    loop = asyncio.get_running_loop()
    deadline = loop.time() + service.config.drain_timeout_s
    while service.num_active and loop.time() < deadline:  # noqa: ASYNC110 (polls a counter for a short time)
        await asyncio.sleep(POLL_S)
    log.info("stopping", extra={"unfinished": service.num_active})


def _on_signal(stop: asyncio.Event) -> None:
    if stop.is_set():
        log.warning("second signal: exiting at once")
        os._exit(1)
    stop.set()
