"""Network checks of the supervisor: free ports, readiness and health."""

from __future__ import annotations

import asyncio
import errno
import json
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode

from common.errors import ConfigError
from common.wire import in_url, listening_host

PROBE_TIMEOUT_S = 2.0
"""Timeout for an answer of a process on this machine."""
_NO_ANSWER = (OSError, EOFError, ValueError, IndexError, asyncio.LimitOverrunError)
"""Errors of a process that has exited, is slow, or does not serve HTTP."""
Address = tuple[str, int] | Path
"""Host and port, or a Unix socket."""
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


@dataclass(frozen=True)
class Health:
    """Result of one `GET /health`: the problem or "", and whether the process has certainly started."""

    problem: str
    has_started: bool


def reachable_host(host: str) -> str:
    """Return the host for connections to a socket bound to `host`: loopback for a wildcard."""
    return _WILDCARDS.get(listening_host(host), host)


def claim_port(host: str, port: int) -> int:
    """Return `port`, or a free port for 0. Raises ConfigError if it is in use or cannot be bound."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(listening_host(host), port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError("host", host, f"an address of this machine ({error.strerror})") from error
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                allowed = f"a free port, but {host}:{port} is in use; try --port {port + 1}"
                raise ConfigError("port", port, allowed) from error
            raise ConfigError("host", host, f"an address and port that can be bound ({error.strerror})") from error
        return int(probe.getsockname()[1])


async def ready_reason(host: str, port: int, *, tls: bool = False, model: str = "") -> str:
    """Return why `GET /ready` does not answer 200 for `model`, or for any model, and "" if it does.

    With `tls` any certificate is accepted, because the certificate of the child may name another host.
    """
    try:
        path = f"/ready?{urlencode({'model': model})}" if model else "/ready"
        status, body = await _get((host, port), path, PROBE_TIMEOUT_S, tls=tls)
    except _NO_ANSWER as error:
        why = "timed out" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
        return f"the router does not answer ({why})"
    return "" if status == 200 else _message(body)


async def metrics_page(host: str, port: int, *, tls: bool = False) -> str:
    """Return the metrics of the router, or "" without an answer. `tls` as in `ready_reason`."""
    try:
        status, body = await _get((host, port), "/metrics", PROBE_TIMEOUT_S, tls=tls)
    except _NO_ANSWER:
        return ""
    return body.decode(errors="replace") if status == 200 else ""


async def ask_health(address: Address, timeout_s: float, *, tls: bool = False) -> Health:
    """Probe the health of a process. A worker whose state is "loading" has not started.

    `tls` as in `ready_reason`.
    """
    try:
        status, body = await _get(address, "/health", timeout_s, tls=tls)
    except TimeoutError:
        return Health(f"no answer within {timeout_s:g} s", has_started=False)
    except _NO_ANSWER as error:
        return Health(f"no answer: {str(error) or type(error).__name__}", has_started=False)
    if status == 200:
        return Health("", has_started=_field(body, "state") != "loading")
    return Health(f"HTTP {status}: {_field(body, 'state') or _message(body)}", has_started=True)


def _any_certificate() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


async def _get(address: Address, path: str, timeout_s: float, *, tls: bool) -> tuple[int, bytes]:
    async with asyncio.timeout(timeout_s):
        if isinstance(address, Path):
            host = "localhost"
            reader, writer = await asyncio.open_unix_connection(address)
        else:
            host = reachable_host(address[0])
            reader, writer = await asyncio.open_connection(host, address[1], ssl=_any_certificate() if tls else None)
        try:
            writer.write(f"GET {path} HTTP/1.1\r\nHost: {in_url(host)}\r\nConnection: close\r\n\r\n".encode())
            head = await reader.readuntil(b"\r\n\r\n")
            return int(head.split(maxsplit=2)[1]), await reader.read()
        finally:
            writer.transport.abort()  # a hanging process would delay the TLS shutdown


def _field(body: bytes, *path: str) -> str:
    """Return the string at a path of the answer, or ""."""
    try:
        value = json.loads(body)
        for key in path:
            value = value[key]
    except (ValueError, KeyError, TypeError):
        return ""
    return value if isinstance(value, str) else ""


def _message(body: bytes) -> str:
    """Return the reason in the answer of the router: the message of its error object, or the whole text."""
    return _field(body, "error", "message") or body.decode(errors="replace").strip() or "not ready"
