"""The token streams of one HTTP request, merged: an answer has one stream per choice."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from contextlib import aclosing
from dataclasses import dataclass

from diptych.common.errors import InternalError, RequestError
from diptych.router.api.errors import as_request_error
from diptych.router.dispatch.client import GenerationClient, GenerationRequest, TokenEvent

log = logging.getLogger(__name__)


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """The next thing that happened to choice `index`, at `at` (perf_counter seconds): an event, or the end by error."""

    index: int
    at: float
    event: TokenEvent | None = None
    error: RequestError | None = None


class Generations:
    """Runs the streams, one task each. `close` (or `leave`) aborts on the workers whatever is not finished."""

    def __init__(self, client: GenerationClient) -> None:
        self._client = client
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._arrivals: deque[Arrival] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._gone = False

    def start(self, index: int, request: GenerationRequest) -> None:
        """Begin the stream of choice `index`."""
        self._tasks[index] = asyncio.create_task(self._pump(index, request), name=request.request_id)

    async def next(self, timeout_s: float) -> list[Arrival]:
        """Everything that arrived since the last call, in order; waits for it, and gives [] after `timeout_s`.

        Raises ClientGone.
        """
        if not self._arrivals and not self._gone:
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            timer = loop.call_later(timeout_s, self._wake)
            try:
                await self._waiter
            finally:
                timer.cancel()
                self._waiter = None
        if self._gone:
            raise ClientGone
        arrivals = list(self._arrivals)
        self._arrivals.clear()
        return arrivals

    def stop(self, index: int) -> None:
        """Choice `index` needs no more tokens."""
        self._tasks[index].cancel()

    def leave(self) -> None:
        """The client went away: abort everything now; `next` raises from here on."""
        self._gone = True
        for task in self._tasks.values():
            task.cancel()
        self._wake()

    async def close(self) -> None:
        """Abort what still runs and wait until all streams are closed."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _pump(self, index: int, request: GenerationRequest) -> None:
        finished = False
        try:
            async with aclosing(self._client.generate(request)) as events:
                async for event in events:
                    finished = bool(event.finish_reason)
                    self._put(Arrival(index, time.perf_counter(), event=event))
            if not finished:
                raise InternalError("the answer ended without a finish reason")
        except Exception as error:  # a bug must end the request, not leave its client waiting
            if not isinstance(error, RequestError):
                log.exception("request failed", extra={"id": request.request_id})
            self._put(Arrival(index, time.perf_counter(), error=as_request_error(error)))

    def _put(self, arrival: Arrival) -> None:
        self._arrivals.append(arrival)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
