"""One HTTP connection: uvicorn's protocol with a bound on the time and memory that a client can cost.

    head within header_timeout_s, MAX_HEAD_BYTES, MAX_HEADERS ─> the application ─> answer read, or cut CLOSE_S later

uvicorn alone bounds neither the wait for a head nor its size, nor the wait for a client that reads no answers, nor the
number of pipelined requests, and logs a warning for each bad request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httptools
import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from common.errors import InvalidRequest, RequestError, Unavailable
from router.request.body import MAX_DISCARDED_BYTES
from router.request.errors import HeadTimeout, HeadTooLarge, error_object
from router.server.entrance import generates
from router.server.places import Places

MAX_HEAD_BYTES = 64 * 1024
"""Of a request's line and headers together."""
MAX_HEADERS = 128
"""Lines."""
MAX_PIPELINED = 16
"""Requests that a client sends before it has the answer to the first."""
CLOSE_S = 30.0
"""How long the client may take to read an answer before a close, or before its next answer."""
PHRASES = {
    400: "Bad Request",
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}


@dataclass(frozen=True, slots=True)
class HTTPBounds:
    """The bounds of connections. `on_reject` is called with the reason of each rejection.

    `answer_s`: how long the answer of a generation may wait for a client that does not read.
    """

    places: Places
    header_timeout_s: float
    answer_s: float
    on_reject: Callable[[str], None]


class CyclePieces:
    """Writes pieces of a streamed answer past the layers of the application: they do nothing with a body, and each
    would cost more than the piece. Implements `router.generation.pieces.Pieces`."""

    __slots__ = ("_cycle", "_on_gone")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle, self._on_gone = cycle, _nothing

    def watch(self, on_gone: Callable[[], None]) -> None:
        self._cycle.flow.resume_reading()  # the end of a connection that is not read is not noticed
        self._on_gone = on_gone
        if self._cycle.disconnected:
            on_gone()

    def unwatch(self) -> None:
        self._on_gone = _nothing

    def lost(self) -> None:
        """The connection is lost."""
        if self._cycle.disconnected:
            self._on_gone()

    @property
    def ready(self) -> bool:
        cycle = self._cycle
        return not (cycle.flow.write_paused or cycle.disconnected or cycle.response_complete) and bool(
            cycle.chunked_encoding
        )

    def write(self, piece: bytes) -> None:
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))


class HTTPConnection(HttpToolsProtocol):
    """A connection with event loop times since when the server waits for the client.

    `awaiting_since`: for a request's head; None while none is due. `unread_since`: for the client to read, because the
    write buffer is full; None while it is not. `closing_since`: for the end of a connection that is being closed.
    """

    def __init__(self, bounds: HTTPBounds, **of_uvicorn: Any) -> None:
        super().__init__(**of_uvicorn)
        self.bounds = bounds
        self.awaiting_since: float | None = None
        self.closing_since: float | None = None
        self.unread_since: float | None = None
        self._in_head = self._in_body = self._refused = False
        self._framing = False  # while a new parser reads the headers that frame the body
        self._num_unread = 0
        self._late_bytes = self._head_bytes = self._num_headers = 0
        self._refusal: tuple[RequestError, str] | None = None

    @property
    def idle(self) -> bool:
        """Whether the server is answering no request."""
        return self.cycle is None or self.cycle.response_complete

    # ------------------------------------------------------------ asyncio's callbacks

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.awaiting_since = self.loop.time()
        if not self.bounds.places.enter(transport):
            most = self.bounds.places.most
            self._refuse(Unavailable(f"{most:,} connections are open, the most this router takes"), "connections")

    def connection_lost(self, exc: Exception | None) -> None:
        self.bounds.places.leave(self.transport)
        super().connection_lost(exc)
        if self.cycle is not None:
            self.cycle.scope["state"]["pieces"].lost()

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
        try:
            self._parse(data)
        except httptools.HttpParserError:
            bad = InvalidRequest("the request is not valid HTTP/1.1")
            self._refuse(*(self._refusal or (bad, "malformed")))
            return
        if self._in_head and self._late_bytes > MAX_HEAD_BYTES:  # an endless line calls none of the parser's callbacks
            self._refuse(_too_large(), "head")
        elif self._num_unread and self.idle:
            self._on_unread()
        elif self.awaiting_since is None and self.idle:  # bytes that begin no request, such as empty lines
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

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._framing:
            return
        self._num_headers += 1
        self._count(len(name) + len(value))
        if self._in_head:  # trailers are dropped
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._framing:
            return
        self._in_head, self._in_body = False, True
        self._num_unread = 0
        self.awaiting_since = None
        self.bounds.places.work(self.transport)
        if len(self.pipeline) >= MAX_PIPELINED:
            self._give_up(InvalidRequest(f"more than {MAX_PIPELINED} requests wait on this connection"), "pipelined")
        super().on_headers_complete()
        self.cycle.scope["state"]["pieces"] = CyclePieces(self.cycle)

    def on_body(self, body: bytes) -> None:
        if self.idle:  # the answer came before the body
            self._num_unread += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade() and not self._tunnels:
            return  # its body follows, see `_parse`
        self._in_body = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self.awaiting_since is not None:  # the next head began before this answer was complete
            self.awaiting_since = self.loop.time()
        super().on_response_complete()
        if self.idle:
            self.bounds.places.rest(self.transport)

    # ------------------------------------------------------------ the server's clock

    def check(self, now: float) -> None:
        """End a connection that kept the server waiting too long; called about once a second."""
        if self.transport.is_closing():
            self.closing_since = self.closing_since or now
            if now - self.closing_since > CLOSE_S:
                self.transport.abort()
        elif self.awaiting_since is not None and self.idle:
            if now - self.awaiting_since <= self.bounds.header_timeout_s:
                return
            if self._in_head:
                allowed = f"{self.bounds.header_timeout_s:g} s"
                self._refuse(HeadTimeout(f"the request's head did not arrive within {allowed}"), "slow_head")
            else:  # no request began
                self.bounds.on_reject("silent")
                self.transport.close()
        elif self.unread_since is not None and not self.idle and now - self.unread_since > self._reading_s:
            self.bounds.on_reject("unread_answer")
            self.transport.abort()

    @property
    def _reading_s(self) -> float:
        """How long the client may read nothing while the write buffer is full."""
        cycles = (self.cycle, *(cycle for cycle, _ in self.pipeline))
        return self.bounds.answer_s if any(generates(cycle.scope) for cycle in cycles) else CLOSE_S

    # ------------------------------------------------------------ inside

    def _parse(self, data: bytes) -> None:
        """Feed the parser, and answer a request for an upgrade as if it asked for none.

        The parser stops behind the head of such a request, because another protocol may follow. But Java's HTTP client
        asks for HTTP/2 with each first POST, and sends the body.
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
        """Whether the request is a CONNECT, behind which no HTTP follows."""
        return bool(self.scope["method"] == "CONNECT")

    def _resume_at_body(self) -> None:
        """Start a new parser at the body of the present request, framed by the headers that say its length."""
        lengths = [pair for pair in self.headers if pair[0] in (b"content-length", b"transfer-encoding")]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own
        self._framing = True
        try:
            fields = b"".join(b"%s: %s\r\n" % pair for pair in lengths)
            self.parser.feed_data(b"POST / HTTP/1.1\r\n" + fields + b"\r\n")
        finally:
            self._framing = False

    def _on_unread(self) -> None:
        """Bound the rest of a body that was answered unread; the parser drops its bytes."""
        if self._in_head:  # the next request's
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

    def _count(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        if self._head_bytes > MAX_HEAD_BYTES or self._num_headers > MAX_HEADERS:
            self._give_up(_too_large(), "head")

    def _give_up(self, error: RequestError, reason: str) -> None:
        """Stop the parser from within its callback; `data_received` then answers with the error."""
        self._refusal = (error, reason)
        raise error

    def _refuse(self, error: RequestError, reason: str) -> None:
        """Answer with `error` and close; an answer that is under way is sent first."""
        self._refused = True
        self.bounds.on_reject(reason)
        if self.pipeline:  # the error could be taken for the answer to one of the whole requests before it
            self.transport.close()
            return
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete and not cycle.more_body:
            cycle.keep_alive = False  # the connection ends with this answer
            return
        started = cycle is not None and cycle.response_started and not cycle.response_complete
        if not started and not self.transport.is_closing():
            self.transport.write(_answer(error))
        self.transport.close()


def _nothing() -> None:
    """A client that leaves concerns no answer."""


def _too_large() -> HeadTooLarge:
    return HeadTooLarge(f"the request's head may have {MAX_HEAD_BYTES:,} bytes and {MAX_HEADERS} headers")


def _answer(error: RequestError) -> bytes:
    body = orjson.dumps(error_object(error))
    retry = "Retry-After: 1\r\n" if error.status == 503 else ""
    head = (
        f"HTTP/1.1 {error.status} {PHRASES[error.status]}\r\nContent-Type: application/json\r\n{retry}"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
