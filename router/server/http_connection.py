"""HTTP connections: uvicorn's protocol with limits on the time and memory that a client can use.

    head within header_timeout_s, MAX_HEAD_BYTES, MAX_HEADERS ─> application ─> client reads the answer, or CLOSE_S

uvicorn limits neither the time and size of a head, nor the time that a client takes to read its answers, nor the
number of pipelined requests, and it logs a warning for each malformed request. It also accepts requests without a
`Host`, sends chunks to HTTP/1.0 clients, and drops the requests of half-closed clients.

The number of open connections is limited. A new connection evicts the one that has been idle longest.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httptools
import orjson
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from common.errors import InvalidRequest, RequestError, Unavailable
from router.request.errors import HeadTimeout, HeadTooLarge, error_object
from router.server.precheck import generates

IDLE_S = 1.0
"""Idle time, in seconds, after which a connection may be evicted. It gives new clients time to send a request, and
others time to send their next one."""
MAX_REFUSED = 64
"""Maximum number of refused connections that stay open until their clients have read the refusal."""
MAX_HEAD_BYTES = 64 * 1024
"""Maximum size of the request line and headers together."""
MAX_URL_BYTES = 8 * 1024
"""Maximum size of a URL. Parsing a query of 64 KiB, with up to 32,000 fields, takes 40 ms."""
MAX_HEADERS = 128
"""Maximum number of header lines."""
MAX_PIPELINED = 16
"""Maximum number of requests that a client may send before it receives the answer to the first."""
CLOSE_S = 30.0
"""Maximum time, in seconds, that a client may take to read an answer before a close, or before its next answer."""
LINGER_S, MAX_DISCARDED_BYTES = 2.0, 64 * 1024 * 1024
"""Maximum time, in seconds, and bytes of a body to discard so that the client of a refused request gets the answer."""
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
PROBE_S, MAX_PROBE_S = 0.1, 30.0
"""Initial and maximum interval of probes of a half-closed connection, in seconds. It doubles each time."""
HOST = re.compile(rb"(?:\[[0-9A-Za-z:.%_~-]+\]|[A-Za-z0-9._~%!$&'()*+,;=-]*)(?::[0-9]*)?")
"""A `Host` header: a name or an address with an optional port (RFC 9110, section 7.2)."""
VERSIONS = ("1.0", "1.1")
PHRASES = {
    400: "Bad Request",
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}


class ConnectionSlots:
    """Set of at most `most` open transports. When it is full, `enter` evicts the transport that has been idle longest.

    Eviction aborts the transport instead of closing it, because a TLS peer that does not answer the close would keep
    the descriptor for 30 s. A connection whose last answer is not fully sent is therefore not evicted.
    """

    def __init__(self, most: int, on_evicted: Callable[[], None], clock: Callable[[], float]) -> None:
        """`clock` returns seconds."""
        self.most, self._on_evicted, self._clock = most, on_evicted, clock
        self._open: set[asyncio.Transport] = set()
        self._idle: OrderedDict[asyncio.Transport, float] = OrderedDict()
        """Start of each connection's idle time, in eviction order."""
        self._refused: dict[asyncio.Transport, None] = {}

    def enter(self, transport: asyncio.Transport) -> bool:
        """Add a new, idle connection. Returns False if all slots are in use; the caller must then refuse it.

        In both cases, `leave` must be called when the connection ends.
        """
        if len(self._open) >= self.most and not self._evict():
            self._refused[transport] = None
            if len(self._refused) > MAX_REFUSED:
                oldest = next(iter(self._refused))
                self.leave(oldest)
                oldest.abort()
            return False
        self._open.add(transport)
        self._idle[transport] = self._clock()
        return True

    def work(self, transport: asyncio.Transport) -> None:
        """Mark a connection as active when a request arrives, which protects it from eviction."""
        self._idle.pop(transport, None)

    def rest(self, transport: asyncio.Transport) -> None:
        """Mark a connection as idle after its last answer. It may already be closing."""
        if transport in self._open:
            self._idle[transport] = self._clock()
            if transport.is_closing():  # eviction loses nothing
                self._idle[transport] = 0.0
                self._idle.move_to_end(transport, last=False)

    def leave(self, transport: asyncio.Transport) -> None:
        """Remove a closed connection."""
        self._open.discard(transport)
        self._idle.pop(transport, None)
        self._refused.pop(transport, None)

    def close_idle(self, idle_s: float) -> bool:
        """Close the connections that have been idle for `idle_s` seconds.

        Returns whether any connection is left, including one whose client still reads its last answer.
        """
        latest = self._clock() - idle_s
        for transport, since in self._idle.items():
            if since > latest:
                break
            transport.close()
        return any(not transport.is_closing() or transport.get_write_buffer_size() for transport in self._open)

    def _evict(self) -> bool:
        latest = self._clock() - IDLE_S
        for transport, since in self._idle.items():
            if since > latest:
                return False
            if not transport.get_write_buffer_size():
                self.leave(transport)
                transport.abort()
                self._on_evicted()
                return True
        return False


@dataclass(frozen=True, slots=True)
class HTTPBounds:
    """Limits of connections. `on_reject` is called with the reason of each rejection.

    `answer_s`: maximum time, in seconds, that the answer of a generation may wait for a client that does not read.
    `is_draining`: whether each answer must close its connection, so that the client connects to another router.
    """

    slots: ConnectionSlots
    header_timeout_s: float
    answer_s: float
    on_reject: Callable[[str], None]
    is_draining: Callable[[], bool]


class CycleWriter:
    """Writes the data of a streamed answer without the application's ASGI layers, which would only add cost.

    Implements `router.generation.answer_writer.AnswerWriter`.
    """

    __slots__ = ("_on_gone", "comment", "cycle")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self.cycle, self._on_gone = cycle, _nothing
        self.comment = b""

    def watch(self, on_gone: Callable[[], None]) -> None:
        self.cycle.flow.resume_reading()  # a connection that is not read cannot detect a disconnect
        self._on_gone = on_gone
        if self.cycle.disconnected:
            on_gone()

    def unwatch(self) -> None:
        self._on_gone = _nothing

    def lost(self) -> None:
        """Handle the loss of the connection."""
        if self.cycle.disconnected:
            self._on_gone()

    @property
    def ready(self) -> bool:
        cycle = self.cycle
        return not (cycle.flow.write_paused or cycle.disconnected or cycle.response_complete) and bool(
            cycle.chunked_encoding
        )

    def write(self, piece: bytes) -> None:
        self.cycle.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))


class HTTPConnection(HttpToolsProtocol):
    """A connection that measures, in event loop time, how long the server has waited for the client.

    `awaiting_since`: start of the wait for a request's head; None while none is expected. `unread_since`: start of the
    wait for the client to read, while the write buffer is full; else None. `closing_since`: start of the close.
    """

    def __init__(self, bounds: HTTPBounds, **of_uvicorn: Any) -> None:
        super().__init__(**of_uvicorn)
        self.bounds = bounds
        self._app = _after_body(self.app, self)
        self.awaiting_since: float | None = None
        self.closing_since: float | None = None
        self.unread_since: float | None = None
        self._in_head = self._in_body = self._refused = False
        self._framing = False  # True while a new parser reads the headers that frame the body
        self._num_unread = 0
        self._is_half_closed = False
        self._unanswered: deque[RequestResponseCycle] = deque()
        self._late_bytes = self._head_bytes = self._num_headers = 0
        self._refusal: tuple[RequestError, str] | None = None

    @property
    def idle(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def closes_now(self) -> bool:
        """Whether the answer that begins now is the last one: the router drains, and no pipelined request waits."""
        return self.bounds.is_draining() and not self.pipeline

    # ------------------------------------------------------------ asyncio's callbacks

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.awaiting_since = self.loop.time()
        if not self.bounds.slots.enter(transport):
            most = self.bounds.slots.most
            self._refuse(Unavailable(f"This router already has {most:,} open connections, its maximum."), "connections")

    def connection_lost(self, exc: Exception | None) -> None:
        self.bounds.slots.leave(self.transport)
        super().connection_lost(exc)
        self._drop_requests()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Handle the end of the client's sending side: complete requests are still answered, then the connection ends.

        A client that has disconnected causes the same event; `_probe` distinguishes the two. HTTP/1.0 clients cannot be
        probed, and TLS has no half-closed connections: both count as disconnected.
        """
        cycle = self.cycle
        if self.idle or cycle.more_body or cycle.scope["http_version"] == "1.0" or self.scheme == "https":
            return False
        cycle.keep_alive = False
        if not self._is_half_closed:  # a transport that resumes reading reports EOF again
            self._is_half_closed = True
            self.loop.call_later(PROBE_S, self._probe, PROBE_S)
        return True

    def pause_writing(self) -> None:
        self.unread_since = self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        self.unread_since = None
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._unset_keepalive_if_required()
        if self._in_head:
            self._late_bytes += len(data)
        elif self._in_body:
            self._sent_bytes += len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError:
            bad = InvalidRequest("The request is not valid HTTP/1.1.")
            self._refuse(*(self._refusal or (bad, "malformed")))
            return
        if self._in_head and self._late_bytes > MAX_HEAD_BYTES:  # an endless line triggers no parser callback
            self._refuse(_too_large(), "head")
        elif self._in_body and self._sent_bytes - self._body_bytes > MAX_HEAD_BYTES + self._body_bytes // 4:
            many = InvalidRequest(
                f"The chunks of the body have {self._sent_bytes:,} bytes for {self._body_bytes:,} bytes of data."
            )
            self._refuse(many, "malformed")
        elif self._num_unread and self.idle:
            self._on_unread()
        elif self.awaiting_since is None and self.idle:  # bytes that do not begin a request, such as empty lines
            self.awaiting_since = self.loop.time()

    # ------------------------------------------------------------ the parser's callbacks

    def on_message_begin(self) -> None:
        if self._framing:
            return
        super().on_message_begin()
        if self._num_unread:
            self.awaiting_since = None
        self._in_head = True
        self._late_bytes = self._head_bytes = self._num_headers = 0
        if self.awaiting_since is None:
            self.awaiting_since = self.loop.time()

    def on_url(self, url: bytes) -> None:
        if self._framing:
            return
        self._count(len(url))
        super().on_url(url)
        if len(self.url) > MAX_URL_BYTES:
            self._give_up(HeadTooLarge(f"The URL exceeds the limit of {MAX_URL_BYTES:,} bytes."), "head")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._framing:
            return
        self._num_headers += 1
        self._count(len(name) + len(value))
        if self._in_head:  # ignores trailers
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._framing:
            return
        self._in_head = False
        self._num_unread = self._sent_bytes = self._body_bytes = 0
        self.awaiting_since = None
        self.bounds.slots.work(self.transport)
        if len(self.pipeline) >= MAX_PIPELINED:
            self._give_up(InvalidRequest(f"More than {MAX_PIPELINED} requests are pipelined."), "pipelined")
        self._check_head()
        self._in_body = True
        super().on_headers_complete()
        self.cycle.scope["state"]["answer_writer"] = CycleWriter(self.cycle)
        self._unanswered.append(self.cycle)

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if self.idle:  # the request was answered before its body was read
            self._num_unread += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade() and not self._tunnels:
            return  # its body follows; see `_parse`
        self._in_body = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self.awaiting_since is not None:  # the next head began before this answer was complete
            self.awaiting_since = self.loop.time()
        self._unanswered.popleft()
        super().on_response_complete()
        if self.idle:
            self.bounds.slots.rest(self.transport)

    # ------------------------------------------------------------ the server's clock

    def check(self, now: float) -> None:
        """Close a connection whose client exceeded a timeout. Called about once per second."""
        if self.transport.is_closing():
            self.closing_since = self.closing_since or now
            if now - self.closing_since > CLOSE_S:
                self.transport.abort()
        elif self.awaiting_since is not None and self.idle:
            if now - self.awaiting_since <= self.bounds.header_timeout_s:
                return
            if self._in_head:
                allowed = f"{self.bounds.header_timeout_s:g} s"
                self._refuse(HeadTimeout(f"The request's headers did not arrive within {allowed}."), "slow_head")
            else:  # no request has begun
                self.bounds.on_reject("silent")
                self.transport.close()
        elif self.unread_since is not None and not self.idle and now - self.unread_since > self._reading_s:
            self.bounds.on_reject("unread_answer")
            self.transport.abort()

    @property
    def _reading_s(self) -> float:
        """Maximum time, in seconds, that a client may stall while the write buffer is full."""
        return self.bounds.answer_s if any(generates(cycle.scope) for cycle in self._unanswered) else CLOSE_S

    # ------------------------------------------------------------ inside

    def _parse(self, data: bytes) -> None:
        """Feed the parser. Requests to upgrade the protocol are answered as if they had no `Upgrade` header.

        The parser stops after the head of such a request, because another protocol may follow. However, Java's HTTP
        client requests HTTP/2 with each first POST and then sends the body as HTTP/1.1.
        """
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                if self._tunnels:
                    self.cycle.keep_alive = False
                    self._refused = True
                    return
                data = data[upgrade.args[0] :]
                self._resume_at_body()
            else:
                return

    @property
    def _tunnels(self) -> bool:
        """Whether the request is a CONNECT, after which no HTTP follows."""
        return bool(self.scope["method"] == "CONNECT")

    def _resume_at_body(self) -> None:
        """Start a new parser at the body of the current request, framed by its length headers."""
        lengths = [pair for pair in self.headers if pair[0] in (b"content-length", b"transfer-encoding")]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # like uvicorn's parser
        self._framing = True
        try:
            fields = b"".join(b"%s: %s\r\n" % pair for pair in lengths)
            self.parser.feed_data(b"POST / HTTP/1.1\r\n" + fields + b"\r\n")
        finally:
            self._framing = False

    def _on_unread(self) -> None:
        """Limit the rest of a body that was not read before the answer. The parser drops its bytes."""
        if self._in_head:  # of the next request
            self._num_unread = 0
        elif not self._in_body:
            self._num_unread, self.awaiting_since = 0, None
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
        elif self._num_unread > MAX_DISCARDED_BYTES:
            self.bounds.on_reject("unread")
            self.transport.close()
        else:
            self.awaiting_since = self.awaiting_since or self.loop.time()

    def _check_head(self) -> None:
        """Reject heads that RFC 9112 forbids but the parser accepts, and handle cases that uvicorn does not."""
        version = self.parser.get_http_version()
        hosts = []
        for name, value in self.headers:
            if name == b"host":
                hosts.append(value)
            elif name == b"transfer-encoding" and value.lower() != b"chunked":
                self._give_up(InvalidRequest("Transfer-Encoding must be chunked."), "malformed")
        if version not in VERSIONS:
            self._give_up(InvalidRequest("The HTTP version must be 1.0 or 1.1."), "malformed")
        if len(hosts) > 1 or (not hosts and version == "1.1"):
            self._give_up(InvalidRequest(f"The request must have one Host header, got {len(hosts)}."), "malformed")
        if hosts and not HOST.fullmatch(hosts[0]):
            self._give_up(InvalidRequest("The Host header must be a host name or an IP address."), "malformed")
        self.app = self._app
        if version == "1.0":
            self.app, self.expect_100_continue = _unchunked(self._app), False

    def _probe(self, delay_s: float) -> None:
        """Send an interim response to a half-closed connection; repeat after `delay_s` seconds.

        A disconnected client answers with a reset, which ends the connection. A waiting client ignores the response, as
        every HTTP/1.1 client must (RFC 9110, section 15.2). During a stream, an SSE comment serves as probe.
        """
        if self.transport.is_closing() or not self._unanswered:
            return
        connection: socket.socket = self.transport.get_extra_info("socket")
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
            return
        writer: CycleWriter = self._unanswered[0].scope["state"]["answer_writer"]
        if not self._unanswered[0].response_started:
            self.transport.write(CONTINUE)
        elif writer.comment and writer.ready:
            writer.write(writer.comment)
        self.loop.call_later(delay_s, self._probe, min(2 * delay_s, MAX_PROBE_S))

    def _drop_requests(self) -> None:
        """Mark all requests as disconnected; uvicorn marks only the last one."""
        for cycle in self._unanswered:
            cycle.disconnected = True
            cycle.message_event.set()
            writer: CycleWriter = cycle.scope["state"]["answer_writer"]
            writer.lost()

    def _count(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        if self._head_bytes > MAX_HEAD_BYTES or self._num_headers > MAX_HEADERS:
            self._give_up(_too_large(), "head")

    def _give_up(self, error: RequestError, reason: str) -> None:
        """Stop the parser from within its callback. `data_received` then answers with the error."""
        self._refusal = (error, reason)
        raise error

    def _refuse(self, error: RequestError, reason: str) -> None:
        """Answer with `error` and close. An answer that is being sent is completed first."""
        self._refused = True
        self.bounds.on_reject(reason)
        if self.pipeline:  # the client could mistake the error for the answer to an earlier request
            self.transport.close()
            return
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete and not cycle.more_body:
            cycle.keep_alive = False  # the connection ends with this answer
            return
        started = cycle is not None and cycle.response_started and not cycle.response_complete
        answered = self._in_body and self.idle
        if started or answered or self.transport.is_closing():
            self.transport.close()
            return
        self.awaiting_since = None
        self._drop_requests()
        self.transport.write(_answer(error))
        if self.transport.can_write_eof():
            self.transport.write_eof()  # a close would reset the connection if the client is still sending
        else:  # TLS
            self.transport.close()
        self.loop.call_later(LINGER_S, self.transport.abort)


def _unchunked(app: ASGIApp) -> ASGIApp:
    """Wrap `app` for HTTP/1.0 clients, which do not support chunks: closing the connection ends a stream."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        cycle: RequestResponseCycle = scope["state"]["answer_writer"].cycle
        is_streamed = False

        async def send_unchunked(message: Message) -> None:
            nonlocal is_streamed
            if message["type"] == "http.response.start":
                is_streamed = not any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
                cycle.chunked_encoding = False if is_streamed else None
            elif is_streamed:
                cycle.expected_content_length = len(message.get("body", b""))  # uvicorn checks each piece against it
            await send(message)

        await app(scope, receive, send_unchunked)

    return answer


def _after_body(app: ASGIApp, connection: HTTPConnection) -> ASGIApp:
    """Wrap `app` so that answers to requests with unread bodies reach their clients, and close draining connections.

    Closing would reset the connection of a client that is still sending, and the answer would be lost. The body is
    therefore discarded first. A client that waits for "100 Continue" gets the answer instead, and its connection is
    closed, because it may or may not send its body afterwards.
    """

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        cycle: RequestResponseCycle = scope["state"]["answer_writer"].cycle

        async def send_after_body(message: Message) -> None:
            is_start = message["type"] == "http.response.start"
            if is_start and connection.closes_now:
                cycle.keep_alive = False  # uvicorn adds the header and closes after the answer
            if is_start and cycle.more_body:
                headers = list(message.get("headers", ()))
                if cycle.waiting_for_100_continue:
                    message = {**message, "headers": [*headers, (b"connection", b"close")]}
                elif not cycle.keep_alive or (b"connection", b"close") in headers:
                    await _discard(receive)
            await send(message)

        await app(scope, receive, send_after_body)

    return answer


async def _discard(receive: Receive) -> None:
    """Read and discard the rest of a body, up to MAX_DISCARDED_BYTES and for up to LINGER_S."""
    size = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            while size < MAX_DISCARDED_BYTES:
                message = await receive()
                size += len(message.get("body", b""))
                if not message.get("more_body", False):
                    return


def _nothing() -> None:
    """Callback without effect."""


def _too_large() -> HeadTooLarge:
    return HeadTooLarge(f"The request's headers exceed the limit of {MAX_HEAD_BYTES:,} bytes or {MAX_HEADERS} lines.")


def _answer(error: RequestError) -> bytes:
    body = orjson.dumps(error_object(error))
    retry = "Retry-After: 1\r\n" if error.status == 503 else ""
    head = (
        f"HTTP/1.1 {error.status} {PHRASES[error.status]}\r\nContent-Type: application/json\r\n{retry}"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
