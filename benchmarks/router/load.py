"""The load: raw connections that count tokens and events by their bytes, so that the client costs next to nothing.

Every token is the character "~", which stands nowhere else in an answer.
"""

from __future__ import annotations

import asyncio
import os
import time
from array import array
from collections.abc import Callable, Coroutine
from multiprocessing.connection import Connection
from typing import Any, Final, cast

import uvloop

from benchmarks.router.tally import ANSWERS, ENDED, EVENTS, FAILED, STARTED, TOKENS, Row, Tally

TOKEN: Final = b"~"
ID: Final = b'"id":"'
LENGTH: Final = b"content-length: "
OPENING: Final = 64
"""Streams of one process that are being opened: each further one waits for one of them to have its first token."""


class StreamClient(asyncio.Protocol):
    """One streamed answer. `times` and `counts`: when how many tokens arrived, if that is recorded.

    `on_begin` is called once, with the first token or when the connection is lost before it.
    """

    def __init__(
        self, request: bytes, row: Row, *, record: bool, on_begin: Callable[[], object] = lambda: None
    ) -> None:
        self._request, self._row, self._record, self._on_begin = request, row, record, on_begin
        self.id = ""
        self.times, self.counts = array("d"), array("L")
        self._half = self._began = self._ended = False
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        row, tokens = self._row, data.count(TOKEN)
        events = data.count(b"\n\n") + (self._half and data.startswith(b"\n"))
        self._half = data.endswith(b"\n") and not data.endswith(b"\n\n")
        if tokens:
            if self._record:
                self.times.append(time.monotonic())
                self.counts.append(tokens)
            row.add(TOKENS, tokens)
        row.add(EVENTS, events)
        if not self._began:
            self._begin(data, tokens)
        if data.endswith(b"0\r\n\r\n"):
            row.add(ENDED)
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._ended:
            self._row.add(FAILED)
        if not self._began:
            self._on_begin()

    def close(self) -> None:
        """Leave, whether the answer is complete or not."""
        self._ended = True
        if self.transport is not None:
            self.transport.abort()

    def _begin(self, data: bytes, tokens: int) -> None:
        if not self.id and (start := data.find(ID)) >= 0:
            start += len(ID)
            self.id = data[start : data.index(b'"', start)].decode()
        if tokens:
            self._began = True
            self._row.add(STARTED)
            self._on_begin()


class LoopClient(asyncio.Protocol):
    """Whole answers, one after the other on one connection; `make` makes the next request, None ends the loop."""

    def __init__(self, make: Callable[[], bytes | None], row: Row, seconds: list[tuple[float, float]]) -> None:
        self._make, self._row, self._seconds = make, row, seconds
        self._data, self._needed, self._sent_at, self._ended = b"", 0, 0.0, False
        self._transport: asyncio.Transport | None = None
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._send()

    def data_received(self, data: bytes) -> None:
        self._data += data
        if not self._needed:
            head = self._data.find(b"\r\n\r\n")
            if head < 0:
                return
            start = self._data.lower().index(LENGTH, 0, head + 2) + len(LENGTH)
            self._needed = head + 4 + int(self._data[start : self._data.index(b"\r", start)])
        if len(self._data) < self._needed:
            return
        self._row.add(ANSWERS if self._data.startswith(b"HTTP/1.1 200") else FAILED)
        self._row.add(TOKENS, self._data.count(TOKEN))
        self._seconds.append((self._sent_at, time.monotonic()))
        self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._ended:
            self._row.add(FAILED)
        if not self.done.done():
            self.done.set_result(None)

    def _send(self) -> None:
        assert self._transport is not None
        self._data, self._needed = b"", 0
        request = self._make()
        if request is None:
            self._ended = True
            self._transport.close()
            return
        self._sent_at = time.monotonic()
        self._transport.write(request)


class Load:
    """The body of a load process: clients, and the commands of the benchmark."""

    def __init__(self, pipe: Connection, tally: Tally, number: int) -> None:
        self._pipe, self._row, self._number = pipe, Row(tally, number), number
        self._streams: list[StreamClient] = []
        self._loops: list[LoopClient] = []
        self._seconds: list[tuple[float, float]] = []
        self._left, self._sent = 0, 0
        self._end = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Until the benchmark says "end"."""
        asyncio.get_running_loop().add_reader(self._pipe.fileno(), self._on_command)
        os.set_blocking(self._pipe.fileno(), True)  # uvloop has changed it
        await self._end.wait()

    def _on_command(self) -> None:
        self._own(self._obey(*self._pipe.recv()))

    def _own(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._pipe.send(task.exception())

    async def _obey(self, command: str, *values: Any) -> None:
        answer: Any = None
        match command:
            case "streams":
                self._own(self._open_streams(*values))
            case "times":
                answer = {f"{one.id}-0": (list(one.times), list(one.counts)) for one in self._streams}
            case "loop":
                await self._open_loops(*values)
            case "seconds":
                answer = await self._seconds_of_all()
            case "stop":
                self._left = 0
                answer = await self._seconds_of_all()
                for stream in self._streams:
                    stream.close()
                self._streams.clear()
            case "end":
                self._end.set()
        self._pipe.send(answer)

    async def _open_streams(self, port: int, num: int, request: bytes, record: bool) -> None:
        """Open so many streams, at most `OPENING` at once; the tally shows how far they are."""
        loop, gate = asyncio.get_running_loop(), asyncio.Semaphore(OPENING)
        for _ in range(num):
            await gate.acquire()
            client = StreamClient(request, self._row, record=record, on_begin=gate.release)
            self._streams.append(client)
            await loop.create_connection(lambda client=client: client, "127.0.0.1", port)  # type: ignore[misc]

    async def _open_loops(self, port: int, num: int, most: int, head: bytes, body: tuple[bytes, bytes]) -> None:
        """`most` requests in all, on `num` connections. The bodies differ in eight digits between the two halves."""
        loop, self._left = asyncio.get_running_loop(), most

        def make() -> bytes | None:
            if not self._left:
                return None
            self._left -= 1
            self._sent += 1
            digits = b"%08d" % (1_000_000 * self._number + self._sent)
            length = b"%d\r\n\r\n" % (len(body[0]) + len(digits) + len(body[1]))
            return b"".join((head, length, body[0], digits, body[1]))

        for _ in range(num):
            client = LoopClient(make, self._row, self._seconds)
            self._loops.append(client)
            await loop.create_connection(lambda client=client: client, "127.0.0.1", port)  # type: ignore[misc]

    async def _seconds_of_all(self) -> list[tuple[float, float]]:
        """Wait for the loops to end; when each whole answer was asked for and there."""
        await asyncio.gather(*(client.done for client in self._loops))
        seconds, self._seconds = self._seconds, []
        self._loops.clear()
        return seconds


def serve(pipe: Connection, tally: Tally, number: int) -> None:
    """Body of the process."""
    pipe.send(None)
    uvloop.run(Load(pipe, tally, number).run())
