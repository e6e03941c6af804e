"""Runs the application until a signal, and ends it without cutting answers that are nearly done.

SIGTERM ─> /ready 503, new requests 503 ─> running answers get drain_timeout_s ─> what is left ends with an error event
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator

import uvicorn
from fastapi import FastAPI

from diptych.router.api.service import Service

log = logging.getLogger(__name__)

BACKLOG = 2048
CLOSE_S = 1
KEEP_ALIVE_S = 75
"""Longer than clients and balancers keep idle connections, so that it is they who close them, never under a request."""
POLL_S = 0.02


def listen(host: str, port: int) -> socket.socket:
    """A listening socket: early clients wait. Raises OSError when the address is taken or not this machine's."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)  # two that are only bound may share a port
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


class _Server(uvicorn.Server):
    """uvicorn without signal handlers of its own."""

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
    """Serve on `listener` until `stop` is set. `close` ends the app's client once the time to drain is over."""
    service: Service = app.state.service
    config = uvicorn.Config(
        app,
        loop="none",  # it runs already
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=CLOSE_S,
    )
    server = _Server(config)
    running = asyncio.create_task(server.serve(sockets=[listener]), name="http")
    stopping = asyncio.create_task(stop.wait(), name="stop")
    await asyncio.wait((running, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    await _drain(service)
    await close()
    server.should_exit = True
    await running


async def _drain(service: Service) -> None:
    """Take nothing new; wait for what runs."""
    service.draining = True
    loop = asyncio.get_running_loop()
    deadline = loop.time() + service.config.drain_timeout_s
    while service.num_active and loop.time() < deadline:  # noqa: ASYNC110 (a counter, looked at for three seconds)
        await asyncio.sleep(POLL_S)
    log.info("stopping", extra={"unfinished": service.num_active})


def _on_signal(stop: asyncio.Event) -> None:
    if stop.is_set():
        log.warning("second signal: exiting at once")
        os._exit(1)
    stop.set()
