"""A lean HTTP/1.1 client for streamed answers: passes body bytes to a callback with their arrival time.

A general client spends 50 to 75 us on each streamed token, on a small machine at the expense of the server under test.
Here a piece of body costs one C parser call and one callback: 10 to 12 us a token, JSON included.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from typing import cast
from urllib.parse import urlsplit

import httptools

BodySink = Callable[[float, bytes], None]  # (time.perf_counter() of arrival, bytes)


class ConnectionLost(ConnectionError):
    """The server closed the connection before the answer was complete. `answered`: some of it had arrived."""

    def __init__(self, message: str, *, answered: bool) -> None:
        super().__init__(message)
        self.answered = answered


class HttpConnection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self) -> None:
        self.reusable = False
        self._transport: asyncio.Transport | None = None
        self._reset()

    def _reset(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._status = 0
        self._framed = False  # length or chunks mark the end of the body, not the end of the connection
        self._arrival = 0.0
        self._sink: dict[bool, BodySink] = {}
        self._done: asyncio.Future[int] | None = None

    async def exchange(self, request: bytes, on_body: BodySink, on_error_body: BodySink) -> int:
        """Send `request`; pass the body to `on_body` at status 200, else to `on_error_body`. Returns the status.

        Raises ConnectionLost, or ValueError for an answer that is not HTTP. Cancellation closes the connection.
        """
        if self._transport is None or self._transport.is_closing():
            raise ConnectionLost("connection is closed", answered=False)
        self._reset()
        self.reusable = False
        self._sink = {True: on_body, False: on_error_body}
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            status = await self._done
        except BaseException:  # cancelled perhaps by the very bytes that complete the answer
            self.close()
            raise
        if not self.reusable:
            self.close()
        return status

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._arrival = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(ValueError(f"the answer is not HTTP: {error}"))
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        if self._status and not self._framed and exc is None:
            self._finish()
        else:
            self._fail(ConnectionLost(f"connection lost: {exc or 'closed by the server'}", answered=bool(self._status)))

    # the parser's callbacks

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._framed = True

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self._done is not None and not self._done.done():
            self._sink[self._status == 200](self._arrival, body)

    def on_message_complete(self) -> None:
        self.reusable = self._parser.should_keep_alive()
        self._finish()

    def _finish(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(self._status)

    def _fail(self, error: Exception) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)


class HttpPool:
    """Connections to one server, kept alive between requests unless `keep_alive` is off."""

    def __init__(self, url: str, *, headers: dict[str, str] | None = None, keep_alive: bool = True) -> None:
        parts = urlsplit(url)
        self._host, self._base = parts.hostname or "", parts.path.rstrip("/")
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._idle: list[HttpConnection] = []
        self._keep_alive = keep_alive
        lines = {
            "Host": parts.netloc.rpartition("@")[2],
            "Connection": "keep-alive" if keep_alive else "close",
            "Content-Type": "application/json",
            "Accept": "text/event-stream, application/json",
            **(headers or {}),
        }
        self._head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())

    async def post(self, path: str, body: bytes, on_body: BodySink, on_error_body: BodySink) -> int:
        """Send a request and return the status, once a sink has the whole body. Raises OSError or ValueError."""
        head = f"POST {self._base}{path} HTTP/1.1\r\n{self._head}Content-Length: {len(body)}\r\n\r\n"
        request = head.encode("latin-1") + body
        while self._idle:
            connection = self._idle.pop()
            try:
                return await self._exchange(connection, request, on_body, on_error_body)
            except ConnectionLost as error:
                if error.answered:
                    raise  # else the server had dropped the idle connection
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(HttpConnection, self._host, self._port, ssl=self._ssl)
        return await self._exchange(connection, request, on_body, on_error_body)

    async def close(self) -> None:
        """Close idle connections; on return those of cancelled requests are closed too."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()
        await asyncio.sleep(0)  # the event loop closes sockets in its next turn

    async def _exchange(
        self, connection: HttpConnection, request: bytes, on_body: BodySink, on_error_body: BodySink
    ) -> int:
        status = await connection.exchange(request, on_body, on_error_body)
        if connection.reusable:
            if self._keep_alive:
                self._idle.append(connection)
            else:
                connection.close()
        return status
