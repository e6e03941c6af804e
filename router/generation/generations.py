"""The token streams of one HTTP request, merged: an answer has one stream per choice."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from common.errors import InternalError, RequestError
from router.dispatch.client import GenerationClient, GenerationRequest, TokenEvent
from router.generation.packed_logprobs import PackedLogprobs
from router.generation.unread import UnreadBudget
from router.request.errors import as_request_error

log = logging.getLogger(__name__)


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


MAX_WAITING = 16
"""Events of one choice that wait for a client each by itself. What comes behind them is added to the last."""
EVENT_BYTES = 1000
TOKEN_BYTES = 40


@dataclass(slots=True)
class Arrival:
    """The next thing that happened to choice `index`, at `at` (perf_counter seconds): an event, or the end by error."""

    index: int
    at: float
    event: TokenEvent | None = None
    error: RequestError | None = None


class Generations:
    """Runs the streams, one task each. `close` (or `leave`) aborts on the workers whatever is not finished.

    What its client has not taken yet is held by `unread`, which may have it given up.
    """

    def __init__(self, client: GenerationClient, unread: UnreadBudget) -> None:
        self._client, self._unread = client, unread
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._arrivals: deque[Arrival] = deque()
        self._last: dict[int, Arrival] = {}
        self._num_waiting: Counter[int] = Counter()
        self._num_bytes = 0
        self._waiter: asyncio.Future[None] | None = None
        self._gone = self._failed = False
        self._aborting: asyncio.Task[None] | None = None

    async def start(self, requests: Sequence[GenerationRequest]) -> None:
        """Begin the stream of each choice, as long as the client is there and none has failed.

        Others have their turn after each: a thousand of them take a tenth of a second to be placed, or longer.
        """
        for index, request in enumerate(requests):
            if self._gone or self._failed:
                return
            self._tasks[index] = asyncio.create_task(self._pump(index, request), name=request.request_id)
            await asyncio.sleep(0)

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
        self._forget()
        return arrivals

    def stop(self, index: int) -> None:
        """Choice `index` needs no more tokens."""
        self._tasks[index].cancel()

    def leave(self) -> None:
        """The client went away: abort everything now; `next` raises from here on."""
        self._gone = True
        self._forget()
        self._aborting = asyncio.create_task(self._abort())
        self._wake()

    async def close(self) -> None:
        """Abort what still runs and wait until all streams are closed."""
        await self._abort()
        await asyncio.gather(*self._tasks.values(), *filter(None, (self._aborting,)), return_exceptions=True)
        self._forget()

    def give_up(self, error: RequestError) -> None:
        """Abort everything and drop what waits: the next thing that is taken is the error."""
        index = next(reversed(self._last))
        self._failed = True
        self._forget()
        self._aborting = asyncio.create_task(self._abort())
        self._put(Arrival(index, time.perf_counter(), error=error))

    async def _abort(self) -> None:
        """End one stream a turn of the event loop: each tells its workers."""
        for task in list(self._tasks.values()):
            if not task.done():
                task.cancel()
                await asyncio.sleep(0)

    async def _pump(self, index: int, request: GenerationRequest) -> None:
        finished = False
        try:
            async with aclosing(self._client.generate(request)) as events:
                async for event in events:
                    finished = bool(event.finish_reason)
                    self._add(index, event)
            if not finished:
                raise InternalError("the answer ended without a finish reason")
        except Exception as error:  # a bug must end the request, not leave its client waiting
            if not isinstance(error, RequestError):
                log.exception("request failed", extra={"id": request.request_id})
            self._failed = True
            self._put(Arrival(index, time.perf_counter(), error=as_request_error(error)))

    def _add(self, index: int, event: TokenEvent) -> None:
        """An event waits for the client, log-probabilities packed, by itself or with the last one of its choice."""
        if self._aborting is not None:
            return
        at, last, packed = time.perf_counter(), self._last.get(index), PackedLogprobs(event.logprobs)
        self._num_bytes += packed.num_bytes + TOKEN_BYTES * len(event.token_ids)
        if last is None or last.event is None or self._num_waiting[index] < MAX_WAITING:
            arrival = Arrival(index, at, replace(event, logprobs=packed) if packed else event)
            self._last[index] = arrival
            self._num_waiting[index] += 1
            self._num_bytes += EVENT_BYTES
            self._put(arrival)
        else:
            last.at, last.event = at, _joined(last.event, event, packed)
        self._unread.hold(self, self._num_bytes)

    def _forget(self) -> None:
        """Nothing waits any more."""
        self._arrivals.clear()
        self._last.clear()
        self._num_waiting.clear()
        self._num_bytes = 0
        self._unread.hold(self, 0)

    def _put(self, arrival: Arrival) -> None:
        self._arrivals.append(arrival)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _joined(before: TokenEvent, event: TokenEvent, packed: PackedLogprobs) -> TokenEvent:
    """Two events of one choice as one; the packed log-probabilities of the first grow by those of the second."""
    logprobs = before.logprobs
    if isinstance(logprobs, PackedLogprobs):
        logprobs.extend(packed)
    return replace(
        event,
        token_ids=before.token_ids + event.token_ids,
        logprobs=logprobs,
        prompt_logprobs=before.prompt_logprobs or event.prompt_logprobs,
    )
