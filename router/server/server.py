"""Runs the application until a signal arrives, and gives running answers time to complete.

SIGTERM ─> /ready 503, every answer closes its connection ─> after drain_timeout_s / 2 new requests get 503
        ─> no request and no connection is left, or drain_timeout_s is over: the rest end with an error event
SIGHUP ──> the router reloads keys and certificate, and reopens the audit log

TLS connections are accepted here, because asyncio's servers do not limit handshakes, so idle clients could use up all
descriptors:

    listener ─> accepted ─> handshake within timeout_s, unless newer ones evict it ─> an ordinary connection

A router process among several also serves its siblings on a Unix socket. After a restart it accepts connections only
once it has found the workers that its siblings have. Otherwise, whether a client finds a worker for its model would
depend on the process to which the kernel assigns its connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import os
import resource
import signal
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import orjson
import uvicorn
from fastapi import FastAPI
from starlette.applications import Starlette

from common.config import RouterConfig, is_loopback
from common.wire import CLIENTS_BACKLOG, listening
from router.api import AVAILABLE, internal_app, record_loads
from router.api.responses import ResponseService
from router.fleet import MAX_DISCOVERED
from router.generation import SEND_GRACE_S, RouterState
from router.server.http_connection import IDLE_S, ConnectionSlots, HTTPBounds, HTTPConnection

if TYPE_CHECKING:  # loaded where there is a store, or several processes
    from router.api.batches import BatchService
    from router.siblings import Siblings

log = logging.getLogger(__name__)

NOTICE_S, NOTICE_SHARE = 5.0, 1 / 6
"""Time after SIGTERM during which idle connections stay open, in seconds, and its maximum share of the drain time. Load
balancers notice `/ready` or the removed endpoint, and clients with pooled connections learn from `Connection: close`,
so that few requests meet a close. `diptych serve` has a short drain time, so that Ctrl-C does not wait for them."""
UVICORN_CLOSE_S = 1
"""Maximum time, in seconds, that uvicorn waits for remaining connections after the drain."""
STARTED_POLL_S = 0.01
"""Polling interval for uvicorn's start."""
PATIENCE_S = 5.0
"""Several heartbeats. A worker that responds to the siblings but not to this process must not block it forever."""
POLL_S = 0.02
"""Polling interval for conditions without an event: workers for each model, and the end of the last answer."""
MAX_ACCEPTED_IN_A_ROW = 64
"""Connections accepted before yielding to other tasks, because an accept that is ready does not yield."""
RETRY_S = 0.1
"""Pause after a failed accept, which most likely means that no descriptor was free."""
KEEP_ALIVE_S = 75
"""Longer than clients and load balancers keep idle connections, so they close first and no request meets a close."""
TICKS_A_CHECK = 10
"""uvicorn ticks ten times per second. Each tick checks a tenth of the connections, so each is checked once per second:
checking ten thousand at a time would delay tokens by milliseconds."""
OTHER_FILES = 256
"""Descriptors for everything but clients and workers, such as files and libraries."""
FILES_A_WORKER = 8
"""Connections and wake-up descriptors of three sockets, doubled while a new connection replaces an old one."""


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class InternalServer:
    """Server of the Unix socket for sibling processes: `start`, serve, `close`."""

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
        """Take over the state of the previous process and listen. Raises OSError."""
        self._siblings.ledger.take_over()
        self._siblings.part.own_socket.unlink(missing_ok=True)
        self._task = asyncio.create_task(self._server.serve(), name="inner http")
        while not self._server.started and not self._task.done():  # noqa: ASYNC110 (uvicorn has no event for it)
            await asyncio.sleep(STARTED_POLL_S)
        if self._task.done():
            self._task.result()

    async def close(self) -> None:
        """Stop serving."""
        self._server.should_exit = True
        if self._task is not None:
            await self._task
        await self._siblings.close()


async def catch_up(router_state: RouterState, siblings: Siblings, stop: asyncio.Event) -> None:
    """Wait until `stop` is set, or until every model that has workers at a sibling has workers here too."""
    began, replies = time.monotonic(), (await siblings.ask_all(AVAILABLE)).values()
    awaited = set(itertools.chain.from_iterable(orjson.loads(body) for body in replies))
    while missing := awaited.difference(router_state.models.available):
        if stop.is_set():
            return
        if time.monotonic() - began > PATIENCE_S:
            known = {"models": ", ".join(sorted(missing)), "waited_s": PATIENCE_S}
            log.warning("no workers found yet for models that have workers at sibling processes", extra=known)
            return
        await asyncio.sleep(POLL_S)


class Handshakes:
    """Runs at most `most` TLS handshakes concurrently. A newer one evicts the oldest, and `on_cut` is called."""

    def __init__(
        self,
        listener: socket.socket,
        tls: ssl.SSLContext,
        protocol: Callable[[], asyncio.Protocol],
        *,
        most: int,
        timeout_s: float,
        on_cut: Callable[[], None],
    ) -> None:
        self._listener, self._tls, self._protocol = listener, tls, protocol
        self._most, self._timeout_s, self._on_cut = most, timeout_s, on_cut
        self._under_way: dict[socket.socket, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Accept connections until cancelled. Cancellation also cancels the running handshakes."""
        try:
            while True:
                for _ in range(MAX_ACCEPTED_IN_A_ROW):
                    await self._accept()
                await asyncio.sleep(0)
        finally:
            for task in self._under_way.values():
                task.cancel()
            self._listener.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            accepted, _ = await loop.sock_accept(self._listener)
        except OSError as error:
            log.debug("accepting a connection failed: %s", error)
            await asyncio.sleep(RETRY_S)
            return
        while len(self._under_way) >= self._most:
            self._cut(next(iter(self._under_way)))
        self._under_way[accepted] = loop.create_task(self._shake(accepted), name="TLS handshake")

    def _cut(self, oldest: socket.socket) -> None:
        """Shut the connection down, so that its handshake fails and closes it."""
        del self._under_way[oldest]
        self._on_cut()
        with contextlib.suppress(OSError):
            oldest.shutdown(socket.SHUT_RDWR)

    async def _shake(self, accepted: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(
                self._protocol, accepted, ssl=self._tls, ssl_handshake_timeout=self._timeout_s
            )
        except OSError as error:  # TLS error, timeout or connection error; the loop has closed the socket
            log.debug("TLS handshake failed: %s", error)
        finally:
            self._under_way.pop(accepted, None)


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket, whose backlog queues early clients. Raises OSError if the address cannot be bound."""
    return listening.listen(host, port, CLIENTS_BACKLOG)


class Server(_Server):
    """uvicorn server with limits on its connections."""

    def __init__(self, router_state: RouterState, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._router_state, settings, self._metrics = router_state, router_state.config, router_state.metrics
        reject = router_state.metrics.count_rejected
        slots = ConnectionSlots(connections_possible(settings), lambda: reject("evicted"), time.monotonic)
        answer_s = settings.request_timeout_s + SEND_GRACE_S
        self._bounds = HTTPBounds(
            slots, settings.header_timeout_s, answer_s, reject, is_draining=lambda: router_state.draining
        )
        certificate = router_state.access.certificate
        self._tls: ssl.SSLContext | None = None if certificate is None else certificate.context
        self._accepting: list[asyncio.Task[None]] = []
        self._listed: list[asyncio.Protocol] = []  # the connections to check in the current second

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        self._router_state.is_loopback = all(is_loopback(each.getsockname()[0]) for each in sockets or ())
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
        """Stop accepting connections; open ones remain."""
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
            most=bounds.slots.most,
            timeout_s=bounds.header_timeout_s,
            on_cut=lambda: bounds.on_reject("handshake"),
        )
        task = asyncio.create_task(handshakes.run(), name="accept")
        task.add_done_callback(self._on_accepting_ended)
        self._accepting.append(task)

    def _on_accepting_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            log.critical("router: accepting connections failed, shutting down", exc_info=task.exception())
            self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        turn = counter % TICKS_A_CHECK
        if turn == 0:
            self._listed = list(self.server_state.connections)
            self._metrics.connections.set(len(self._listed))
        self._check(self._listed[turn::TICKS_A_CHECK])
        return await super().on_tick(counter)

    def close_idle(self, idle_s: float) -> bool:
        """Close the connections that have been idle for `idle_s` seconds. Returns whether any connection is left."""
        return self._bounds.slots.close_idle(idle_s)

    def check_connections(self) -> None:
        """Close all connections whose clients exceeded a timeout."""
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


def stop_on_signals() -> asyncio.Event:
    """Return an event that SIGINT or SIGTERM sets. A second signal exits the process immediately."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, _on_signal, stop)
    return stop


async def serve(
    app: FastAPI, listener: socket.socket, close: Callable[[], Awaitable[None]], stop: asyncio.Event
) -> None:
    """Serve on `listener` until `stop` is set. `close` closes the application's client after the drain."""
    router_state: RouterState = app.state.router_state
    kept: ResponseService = app.state.responses
    batches: BatchService | None = app.state.batches
    allow_files(router_state.config)
    inner = (
        None
        if router_state.siblings is None
        else InternalServer(internal_app(router_state, kept, router_state.siblings), router_state.siblings)
    )
    if inner is not None:
        await inner.start()
    if router_state.access.reloads:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, router_state.access.reload)
    if router_state.siblings is not None:
        await catch_up(router_state, router_state.siblings, stop)
    server = server_of(app)
    running = asyncio.create_task(server.serve(sockets=[listener]), name="http")
    stopping = asyncio.create_task(stop.wait(), name="stop")
    watching = asyncio.create_task(router_state.access.watch(), name="watch")
    recording = asyncio.create_task(record_loads(router_state), name="record-load")
    if batches is not None:
        batches.start()
    await asyncio.wait((running, stopping, watching), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    try:
        if batches is not None:
            batches.drain()
        await _drain(router_state, server.close_idle)
        if batches is not None:
            await batches.stop()
        await kept.stop()
        await close()
        server.should_exit = True
        await running
    finally:
        if inner is not None:
            await inner.close()
        for task in (watching, recording):
            task.cancel()
        await asyncio.gather(watching, recording, return_exceptions=True)
        if batches is not None:
            await batches.close()
        await kept.close()
        await asyncio.to_thread(router_state.access.close)
    if watching.done() and not watching.cancelled():
        watching.result()  # it ends only because of a bug; raise it


def server_of(app: FastAPI) -> Server:
    """Create the server of an application from `build_app`."""
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
    server = Server(app.state.router_state, config)
    server.lifespan = config.lifespan_class(config)
    return server


def files_needed(config: RouterConfig) -> int:
    """Return the number of descriptors for all allowed clients, their TLS handshakes, and the most workers."""
    return _files_a_connection(config) * config.max_connections + _other_files(config)


def connections_possible(config: RouterConfig) -> int:
    """Return the number of allowed connections for which descriptors exist. Others would get no answer."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return config.max_connections
    files = max(soft - _other_files(config), soft // 2)
    return max(1, min(config.max_connections, files // _files_a_connection(config)))


def allow_files(config: RouterConfig) -> None:
    """Raise the soft limit of open files to what is needed. Logs a warning if the hard limit is too low."""
    needed = files_needed(config)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    possible = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if possible > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (possible, hard))
        log.info("raised the limit of open files", extra={"files": possible, "before": soft})
    if possible < needed:
        said = {"files": possible, "wanted": needed, "connections": connections_possible(config)}
        log.warning("the limit of open files (ulimit -n) is too low for --max-connections", extra=said)


def _files_a_connection(config: RouterConfig) -> int:
    return 2 if config.tls_cert else 1


def _other_files(config: RouterConfig) -> int:
    static = len(config.prefill) + len(config.decode)
    num_workers = static if config.discovery == "static" else MAX_DISCOVERED
    return FILES_A_WORKER * num_workers + OTHER_FILES


async def _drain(router_state: RouterState, close_idle: Callable[[float], bool]) -> None:
    """Wait until no request and no connection is left, for at most `drain_timeout_s`.

    New requests are served during the first half of it, since clients do not stop at once. `close_idle` closes
    connections that have been idle for the given seconds, and returns whether any connection is left.
    """
    router_state.draining = True
    loop, timeout_s = asyncio.get_running_loop(), router_state.config.drain_timeout_s
    began = loop.time()
    log.info("draining", extra={"requests": router_state.num_active, "most_s": timeout_s})
    while (elapsed_s := loop.time() - began) < timeout_s:
        router_state.refusing |= elapsed_s >= timeout_s / 2
        has_clients = close_idle(idle_limit_s(elapsed_s, timeout_s))
        if not router_state.num_active and not has_clients:
            break
        await asyncio.sleep(POLL_S)
    router_state.refusing = True
    log.info("stopping", extra={"unfinished": router_state.num_active})


def idle_limit_s(elapsed_s: float, timeout_s: float) -> float:
    """Return how long a connection may be idle, in seconds, `elapsed_s` after the start of a drain of `timeout_s`."""
    notice_s = min(NOTICE_S, NOTICE_SHARE * timeout_s)
    return math.inf if elapsed_s < notice_s else min(IDLE_S, notice_s)


def _on_signal(stop: asyncio.Event) -> None:
    if stop.is_set():
        log.warning("second signal received: exiting immediately")
        os._exit(1)
    stop.set()
