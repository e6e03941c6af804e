"""Connections that send too slowly or too much, or are too many, end, and the server serves the others meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme

from router.request.body import BodyBudget
from router.server import http_connection
from router.server import server as server_module
from router.server.http_connection import (
    IDLE_S,
    MAX_HEAD_BYTES,
    MAX_HEADERS,
    MAX_REFUSED,
    MAX_URL_BYTES,
    ConnectionSlots,
)

from ..raw_http import BODY, GET, POST, Connect, all_of, closed, error_in, raw, rejected


@pytest.fixture(autouse=True)
def refused_clients_are_soon_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that do not close a refused connection are not waited for as long as usual."""
    monkeypatch.setattr(http_connection, "LINGER_S", 0.2)


# ---------------------------------------------------------------- heads


@pytest.mark.parametrize(
    "head",
    [
        b"X: " + b"a" * MAX_HEAD_BYTES + b"\r\n\r\n",
        b"".join(b"X%d: %s\r\n" % (i, b"a" * 4096) for i in range(17)) + b"\r\n",
        b"".join(b"X%d: a\r\n" % i for i in range(MAX_HEADERS + 1)) + b"\r\n",
        b"X: " + b"a" * 10_000_000,  # never ends
        b"X" * 10_000_000,
    ],
    ids=["one", "several", "many", "an endless value", "an endless name"],
)
async def test_a_head_that_is_too_large(running: Any, connect: Connect, head: bytes) -> None:
    reader, writer = await connect(running)
    writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + head)
    answer = await all_of(reader)
    assert not answer or error_in(answer) == (431, "request_header_fields_too_large")  # a reset may overtake it
    assert (
        await running.metric('diptych_http_rejected_total{engine="router",model_name="tiny-random",reason="head"') == 1
    )


async def test_a_url_that_is_too_long(running: Any, connect: Connect) -> None:
    answer = await raw(running, connect, b"GET /" + b"a" * MAX_HEAD_BYTES + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert error_in(answer)[0] == 431


@pytest.mark.parametrize(("size", "status"), [(MAX_URL_BYTES, 200), (MAX_URL_BYTES + 1, 431)])
async def test_a_query_of_many_fields(running: Any, connect: Connect, size: int, status: int) -> None:
    url = (b"/health?" + b"a&" * size)[:size]
    answer = await raw(running, connect, b"GET " + url + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 %d " % status)


async def test_a_large_head_within_the_bound(running: Any, connect: Connect) -> None:
    data = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nX: " + b"a" * 60_000 + b"\r\n\r\n"
    assert (await raw(running, connect, data)).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("sent", [b"GET /health HT", b"GET /health HTTP/1.1\r\nHost: localhost\r\n"])
async def test_a_head_that_does_not_end(start: Any, tools: Any, connect: Connect, sent: bytes) -> None:
    running = await start(header_timeout_s=0.1)
    reader, writer = await connect(running)
    writer.write(sent)
    connections = running.server.server_state.connections
    await tools.until(lambda: any(connection._in_head for connection in connections))
    await closed(running)
    assert error_in(await all_of(reader)) == (408, "request_timeout")


@pytest.mark.parametrize("sent", [b"", b"\r\n\r\n"])
@pytest.mark.parametrize("used", [False, True])
async def test_a_connection_that_asks_nothing(start: Any, connect: Connect, used: bool, sent: bytes) -> None:
    """Empty lines begin no request, and do not stop the timer of an idle connection."""
    running = await start(header_timeout_s=0.1)
    reader, writer = await connect(running)
    if used:
        writer.write(GET)
        assert b"200 OK" in await reader.readuntil(b"}")
    writer.write(sent)
    if used and not sent:
        (connection,) = running.server.server_state.connections
        assert connection.timeout_keep_alive_task is not None  # it may stay idle as long as any other
        return
    await asyncio.sleep(0.05)
    await closed(running)
    assert await all_of(reader) == b""


async def test_bytes_that_come_one_by_one_buy_no_time(start: Any, tools: Any, connect: Connect) -> None:
    running = await start(header_timeout_s=0.3)
    _, writer = await connect(running)
    writer.write(b"GET /")

    async def drip() -> None:
        while not writer.is_closing():
            writer.write(b"a")
            await asyncio.sleep(0.01)

    dripping = asyncio.create_task(drip())
    await tools.until(lambda: running.server.server_state.connections)
    await closed(running)
    dripping.cancel()
    await asyncio.gather(dripping, return_exceptions=True)


async def test_a_long_answer_is_no_idle_connection(start: Any, tools: Any, connect: Connect) -> None:
    running = await start(header_timeout_s=0.05)
    running.engine.hold_after = 1
    reader, writer = await connect(running)
    writer.write(POST + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY)
    await tools.until(lambda: running.engine.requests)
    for _ in range(20):
        running.server.check_connections()
        await asyncio.sleep(0.01)
    running.engine.go.set()
    assert (await all_of(reader)).startswith(b"HTTP/1.1 200")


async def test_an_idle_connection_that_was_used_stays(start: Any, connect: Connect) -> None:
    running = await start(header_timeout_s=0.05)
    reader, writer = await connect(running)
    for _ in range(2):
        writer.write(GET)
        assert b"200 OK" in await reader.readuntil(b"}")
        await asyncio.sleep(0.1)
        running.server.check_connections()
        await asyncio.sleep(0)


async def test_ten_ticks_check_each_connection_once(
    running: Any, tools: Any, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(25):
        await connect(running)
    connections = running.server.server_state.connections
    await tools.until(lambda: len(connections) >= 25)
    checked: list[Any] = []
    monkeypatch.setattr(http_connection.HTTPConnection, "check", lambda connection, _: checked.append(connection))
    most = 0
    for tick in range(server_module.TICKS_A_CHECK):
        before = len(checked)
        await running.server.on_tick(tick)
        most = max(most, len(checked) - before)
    assert len(checked) == len(connections) and set(checked) == connections
    assert most <= 3, "a tick looks at a tenth of them"


@contextlib.asynccontextmanager
async def small_buffers(running: Any, tools: Any, request: bytes) -> AsyncIterator[tuple[socket.socket, Any]]:
    """Send a request over a connection with small buffers. Yield the client's socket and the server's connection."""
    running.server.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # inherited by accept
    loop = asyncio.get_running_loop()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        await loop.sock_connect(client, ("127.0.0.1", int(running.url.rpartition(":")[2])))
        await loop.sock_sendall(client, request)
        await tools.until(lambda: running.server.server_state.connections)
        (connection,) = running.server.server_state.connections
        yield client, connection


async def test_an_unread_answer_holds_no_connection(start: Any, tools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connection, "CLOSE_S", 0.1)
    running = await start()
    request = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    async with small_buffers(running, tools, request) as (_, connection):
        await tools.until(lambda: connection.cycle is not None and connection.cycle.response_complete)
        assert connection.transport.is_closing() and connection.transport.get_write_buffer_size()
        await closed(running)


@pytest.mark.parametrize(
    "request_data", [GET, POST + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY], ids=["any", "a generation"]
)
async def test_a_request_behind_an_unread_answer_holds_no_connection(
    start: Any, tools: Any, monkeypatch: pytest.MonkeyPatch, request_data: bytes
) -> None:
    monkeypatch.setattr(http_connection, "CLOSE_S", 0.1)
    monkeypatch.setattr(server_module, "SEND_GRACE_S", 0.1)
    running = await start(request_timeout_s=0.1)
    request = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"
    async with small_buffers(running, tools, request) as (client, connection):
        await tools.until(lambda: connection.cycle is not None and connection.cycle.response_complete)
        await asyncio.get_running_loop().sock_sendall(client, request_data)
        await tools.until(lambda: not connection.idle)
        await asyncio.wait_for(closed(running), 10)
        await tools.until(lambda: not running.server.server_state.tasks)
    assert await rejected(running, "unread_answer") == 1


async def test_a_slow_reader_of_a_stream_is_not_cut(start: Any, tools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connection, "CLOSE_S", 0.0)
    running = await start()
    body = b'{"prompt": "hi", "max_tokens": 2000, "stream": true}'
    request = POST + b"Content-Length: %d\r\n\r\n" % len(body) + body
    async with small_buffers(running, tools, request) as (client, connection):
        await tools.until(lambda: connection.unread_since is not None)
        for _ in range(10):
            await asyncio.sleep(0.01)
            running.server.check_connections()
        heard = b""
        while b"[DONE]" not in heard:
            heard = heard[-16:] + await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, 65536), 10)


# ---------------------------------------------------------------- how many


@pytest.fixture
def all_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each connection without a request counts as idle at once."""
    monkeypatch.setattr(http_connection, "IDLE_S", 0.0)


@pytest.mark.usefixtures("all_idle")
async def test_a_new_connection_takes_the_place_of_an_idle_one(start: Any, connect: Connect) -> None:
    running = await start(max_connections=3)
    idle = [await connect(running) for _ in range(3)]
    for _ in range(5):
        data = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        assert (await raw(running, connect, data)).startswith(b"HTTP/1.1 200")
    assert any(reader.at_eof() for reader, _ in idle)


@pytest.mark.usefixtures("all_idle")
async def test_the_longest_idle_makes_room(start: Any, tools: Any, connect: Connect) -> None:
    """A new connection stays, and so does the one that sent the last request."""
    running = await start(max_connections=3)
    first, second = await connect(running), await connect(running)
    await tools.until(lambda: len(running.server.server_state.connections) == 2)
    first[1].write(GET)
    assert b"200 OK" in await first[0].readuntil(b"}")
    later = [await connect(running) for _ in range(2)]
    assert await all_of(second[0]) == b""
    for reader, writer in (first, *later):
        writer.write(GET)
        assert b"200 OK" in await reader.readuntil(b"}")


@pytest.mark.usefixtures("all_idle")
async def test_peers_that_never_end_tls_hold_no_more_places_than_there_are(
    start: Any, tools: Any, tmp_path: Path
) -> None:
    """The clients do not answer the close of TLS, for which asyncio waits half a minute."""
    running = await start(max_connections=3, **certificate(tmp_path))
    clients = [await shaken_hands(running) for _ in range(4)]
    clients += [
        await shaken_hands(running, GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")) for _ in range(8)
    ]
    async with asyncio.timeout(10):
        await tools.until(lambda: len(running.server.server_state.connections) <= 3)
    async with httpx.AsyncClient(verify=False, trust_env=False) as honest:
        answer = await honest.get(running.url.replace("http:", "https:") + "/health")
    assert answer.status_code == 200
    for client in clients:
        client.close()


async def test_no_more_handshakes_are_under_way_than_there_are_places(
    start: Any, tools: Any, connect: Connect, tmp_path: Path
) -> None:
    running = await start(max_connections=3, **certificate(tmp_path))
    silent = [await connect(running) for _ in range(10)]
    ended = [asyncio.create_task(all_of(reader)) for reader, _ in silent]
    async with asyncio.timeout(10):
        await tools.until(lambda: sum(task.done() for task in ended) >= 7)
    async with httpx.AsyncClient(verify=False, trust_env=False) as honest:
        url = running.url.replace("http:", "https:")
        assert (await honest.get(url + "/health")).status_code == 200
        metrics = (await honest.get(url + "/metrics")).text
    assert 'reason="handshake"} 8.0' in metrics
    for _, writer in silent:
        writer.close()
    await asyncio.gather(*ended)


def certificate(folder: Path) -> dict[str, str]:
    """Settings for TLS."""
    issued = trustme.CA().issue_cert("127.0.0.1")
    issued.cert_chain_pems[0].write_to_path(folder / "tls.crt")
    issued.private_key_pem.write_to_path(folder / "tls.key")
    return {"tls_cert": str(folder / "tls.crt"), "tls_key": str(folder / "tls.key")}


async def shaken_hands(running: Any, data: bytes = b"") -> socket.socket:
    """A TLS connection whose client sends `data` and reads nothing more."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(incoming, outgoing)
    client, loop = socket.socket(), asyncio.get_running_loop()
    client.setblocking(False)
    await loop.sock_connect(client, ("127.0.0.1", int(running.url.rpartition(":")[2])))
    done = False
    while not done:
        with contextlib.suppress(ssl.SSLWantReadError):
            tls.do_handshake()
            done = True
        await loop.sock_sendall(client, outgoing.read())
        if not done:
            incoming.write(await loop.sock_recv(client, 65536))
    if data:
        tls.write(data)
        await loop.sock_sendall(client, outgoing.read())
    await loop.sock_recv(client, 65536)  # the session tickets: the server has completed the handshake
    return client


async def test_no_place_is_taken_from_a_request(start: Any, tools: Any, connect: Connect) -> None:
    running = await start(max_connections=2)
    running.engine.hold_after = 1
    busy = [await connect(running) for _ in range(2)]
    for _, writer in busy:
        writer.write(POST + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY)
    await tools.until(lambda: len(running.engine.requests) == 2)
    reader, _ = await connect(running)
    answer = await all_of(reader)
    assert error_in(answer) == (503, "service_unavailable") and b"Retry-After" in answer
    running.engine.go.set()
    for reader, _ in busy:
        assert (await all_of(reader)).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "data", [GET, POST + b"Content-Length: 3000000\r\n\r\n" + b"x" * 3_000_000], ids=["", "a body"]
)
async def test_new_clients_beyond_the_bound_are_told_to_retry(
    start: Any, tools: Any, connect: Connect, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    """No connection is reset without an answer, although no client has sent its request when the last one connects."""
    monkeypatch.setattr(http_connection, "IDLE_S", 3600.0)
    monkeypatch.setattr(http_connection, "LINGER_S", 3600.0)
    running = await start(max_connections=4)
    pipes = [await connect(running) for _ in range(20)]
    await tools.until(lambda: len(running.server.server_state.connections) == 20)
    for _, writer in pipes[4:]:
        writer.write(data)
        await writer.drain()
    for reader, writer in pipes[4:]:
        answer = await all_of(reader)
        assert error_in(answer) == (503, "service_unavailable") and b"Retry-After: 1\r\n" in answer
        writer.close()
    for reader, writer in pipes[:4]:
        writer.write(GET)
        assert b"200 OK" in await reader.readuntil(b"}")
        writer.close()
    await tools.until(lambda: not running.server.server_state.connections)


async def test_a_refused_client_that_stays_is_cut(
    start: Any, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_connection, "LINGER_S", 0.05)
    running = await start()
    reader, writer = await connect(running)
    writer.write(b"garbage\r\n\r\n")
    assert error_in(await all_of(reader))[0] == 400
    with pytest.raises(ConnectionError):
        for _ in range(1000):
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.01)


class Transport:
    """As much of a transport as `ConnectionSlots` uses."""

    def __init__(self, unsent: int = 0, *, closing: bool = False) -> None:
        self.unsent, self.closing, self.aborted = unsent, closing, False

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    def abort(self) -> None:
        self.aborted = True


def test_a_drain_waits_for_what_clients_still_read() -> None:
    slots = ConnectionSlots(2, lambda: None, lambda: 0.0)
    idle, unsent = Transport(), Transport(unsent=1)
    assert slots.enter(idle) and slots.enter(unsent)  # type: ignore[arg-type]
    assert slots.close_idle(1.0) and not idle.closing
    assert slots.close_idle(0.0) and idle.closing and unsent.closing, "the end of an answer is in the buffer"
    unsent.unsent = 0
    assert not slots.close_idle(0.0)


def test_who_makes_room() -> None:
    now = 100.0
    evicted: list[None] = []
    slots = ConnectionSlots(4, lambda: evicted.append(None), lambda: now)
    silent, busy, unsent, closing = (Transport(), Transport(), Transport(unsent=1), Transport())
    for transport in (silent, busy, unsent, closing):
        assert slots.enter(transport)  # type: ignore[arg-type]
    slots.work(busy)  # type: ignore[arg-type]
    assert not slots.enter(Transport())  # type: ignore[arg-type]
    slots.work(closing)  # type: ignore[arg-type]
    closing.closing = True
    slots.rest(closing)  # type: ignore[arg-type]
    assert slots.enter(Transport()) and closing.aborted  # type: ignore[arg-type]
    assert not slots.enter(Transport())  # type: ignore[arg-type]
    now += IDLE_S
    assert slots.enter(Transport()) and silent.aborted  # type: ignore[arg-type]
    assert slots.enter(Transport())  # type: ignore[arg-type]
    assert not slots.enter(Transport())  # type: ignore[arg-type]
    assert not busy.aborted and not unsent.aborted and len(evicted) == 3


def test_no_more_refused_connections_stay_than_there_are_places_for() -> None:
    slots = ConnectionSlots(1, lambda: None, lambda: 0.0)
    assert slots.enter(Transport())  # type: ignore[arg-type]
    refused = [Transport() for _ in range(MAX_REFUSED + 10)]
    assert not any(slots.enter(transport) for transport in refused)  # type: ignore[arg-type]
    assert [transport.aborted for transport in refused] == [True] * 10 + [False] * MAX_REFUSED


# ---------------------------------------------------------------- bodies


async def test_large_bodies_share_a_budget(start: Any, connect: Connect) -> None:
    running = await start(max_body_bytes=200_000)
    router_state = running.app.state.router_state
    router_state.bodies.num_bytes = router_state.bodies.max_bytes - 100_000  # as if the server were reading others
    body = b'{"prompt": "%s", "max_tokens": 1}' % (b"x" * 150_000)
    refused = await running.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
    assert (await running.completion(max_tokens=1)).status_code == 200  # a small body always has room
    assert router_state.bodies.num_bytes == router_state.bodies.max_bytes - 100_000  # all memory is given back


def test_a_lease_is_given_back_whatever_happens() -> None:
    budget = BodyBudget(1000)
    with contextlib.suppress(ValueError), budget.lease() as lease:
        lease.take(500)
        raise ValueError
    assert budget.num_bytes == 0


async def test_a_draining_router_answers_what_was_pipelined_before_it_closes(running: Any, connect: Connect) -> None:
    running.app.state.router_state.draining = True
    answers = (await raw(running, connect, GET + GET)).lower()
    assert (answers.count(b"http/1.1 200"), answers.count(b"connection: close")) == (2, 1)
