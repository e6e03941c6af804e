"""The token streams of one HTTP request, one per choice, merged."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

import msgspec
from msgspec.structs import replace

from common.errors import DeadlineExceeded, InternalError, Overloaded, RequestError
from router.dispatch import GenerationRequest, TokenEvent, TokenSource
from router.generation.budgets import UnreadBudget
from router.generation.logprobs import PackedLogprobs
from router.request.errors import as_request_error


class LimitedClient:
    """Client that runs at most `most_at_once` requests of one answer at a time. Waiting counts towards the deadline.

    When the workers refuse a request for lack of capacity while other requests of the answer are running, the limit is
    reduced by one and the request waits for one of those to finish.
    """

    def __init__(self, client: TokenSource, most_at_once: int) -> None:
        self._client, self._slots = client, asyncio.Semaphore(most_at_once)
        self._began, self._num_running = time.monotonic(), 0

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        """See `TokenSource.generate`. A request that fails after its first event is not retried."""
        while True:
            placed = msgspec.structs.replace(request, deadline_s=await self._acquire_slot(request))
            self._num_running += 1
            began = drops_slot = False
            try:
                async with aclosing(self._client.generate(placed)) as events:
                    async for event in events:
                        began = True
                        yield event
                return
            except Overloaded:
                if began or self._num_running == 1:
                    raise
                drops_slot = True
            finally:
                self._num_running -= 1
                if not drops_slot:
                    self._slots.release()

    async def _acquire_slot(self, request: GenerationRequest) -> float:
        """Wait for a slot. Returns the remaining time in seconds. Raises DeadlineExceeded."""
        try:
            async with asyncio.timeout(self._remaining_s(request)):
                await self._slots.acquire()
        except TimeoutError:
            raise self._timed_out(request) from None
        remaining_s = self._remaining_s(request)
        if remaining_s <= 0:
            self._slots.release()
            raise self._timed_out(request)
        return remaining_s

    def _remaining_s(self, request: GenerationRequest) -> float:
        return request.deadline_s - (time.monotonic() - self._began)

    def _timed_out(self, request: GenerationRequest) -> DeadlineExceeded:
        return DeadlineExceeded(f"The request timeout of {request.deadline_s:g} s passed before all prompts started.")


log = logging.getLogger(__name__)


MAX_WAITING = 16
"""Events of one choice that wait for a client separately; later ones are merged into the last."""
EVENT_BYTES, TOKEN_BYTES = 1000, 40
"""Memory per waiting event, and per token in it, without log-probabilities."""


class ClientGone(Exception):
    """The client disconnected before its answer was complete."""


@dataclass(slots=True)
class Arrival:
    """An event of choice `index`, or the error that ended it. `at` is its time in perf_counter seconds."""

    index: int
    at: float
    event: TokenEvent | None = None
    error: RequestError | None = None


ChoiceSink = Callable[[int, float, TokenEvent], bool]
"""Processes an event of a choice, with its time. Returns False to leave the event to `Generations.next`."""


class Generations:
    """Runs one task per stream. `close` and `leave` abort unfinished streams on the workers.

    `unread` counts the bytes that wait for the client and may abort the answer. While `next` waits, events go to `sink`
    first. `next` returns the events that `sink` declines, and those that follow them.
    """

    def __init__(self, client: TokenSource, unread: UnreadBudget) -> None:
        self._client, self._unread = client, unread
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._arrivals: deque[Arrival] = deque()
        self._last: dict[int, Arrival] = {}
        self._num_waiting: Counter[int] = Counter()
        self._num_bytes = 0
        self._waiter: asyncio.Future[None] | None = None
        self._gone = self._failed = False
        self._aborting: asyncio.Task[None] | None = None
        self.sink: ChoiceSink | None = None

    async def start(self, requests: Sequence[GenerationRequest]) -> None:
        """Start the stream of each choice. Stops early if the client disconnects or a stream fails.

        Yields to other tasks after each stream: starting a thousand takes 0.1 s or longer.
        """
        for index, request in enumerate(requests):
            if self._gone or self._failed:
                return
            self._tasks[index] = asyncio.create_task(self._pump(index, request), name=request.request_id)
            await asyncio.sleep(0)

    async def next(self, timeout_s: float) -> list[Arrival]:
        """Wait for arrivals and return them; [] after `timeout_s` or `wake`. Raises ClientGone."""
        if not self._arrivals and not self._gone:
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            timer = loop.call_later(timeout_s, self.wake)
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
        """Abort choice `index`, which needs no more tokens."""
        self._tasks[index].cancel()

    def leave(self) -> None:
        """Handle a disconnected client: abort all streams and make `next` raise."""
        self._gone = True
        self._forget()
        self._aborting = asyncio.create_task(self._abort())
        self.wake()

    async def close(self) -> None:
        """Abort running streams and wait until all are closed."""
        if self._aborting is not None or not all(task.done() for task in self._tasks.values()):
            await self._abort()
            await asyncio.gather(*self._tasks.values(), *filter(None, (self._aborting,)), return_exceptions=True)
        self._forget()

    def give_up(self, error: RequestError) -> None:
        """Abort all streams and drop what waits for the client. The next arrival is the error."""
        index = next(reversed(self._last))
        self._failed = True
        self._forget()
        self._aborting = asyncio.create_task(self._abort())
        self._put(Arrival(index, time.perf_counter(), error=error))

    async def _abort(self) -> None:
        """Cancel one stream per event loop iteration, because each sends aborts to its workers."""
        for task in list(self._tasks.values()):
            if not task.done():
                task.cancel()
                await asyncio.sleep(0)

    async def _pump(self, index: int, request: GenerationRequest) -> None:
        finished = False
        request = replace(request, sink=partial(self._pass_on, index))
        try:
            async with aclosing(self._client.generate(request)) as events:
                async for event in events:
                    finished = bool(event.finish_reason)
                    self._add(index, event)
            if not finished:
                raise InternalError("The answer ended without a finish reason.")
        except Exception as error:  # after a bug, the client must still get an answer
            if not isinstance(error, RequestError):
                log.exception("request failed", extra={"id": request.request_id})
            self._failed = True
            self._put(Arrival(index, time.perf_counter(), error=as_request_error(error)))

    def _pass_on(self, index: int, event: TokenEvent) -> bool:
        """Implements `router.dispatch.client.Sink`."""
        waiter = self._waiter
        if self.sink is None or waiter is None or waiter.done() or self._aborting is not None:
            return False
        return self.sink(index, time.perf_counter(), event)

    def _add(self, index: int, event: TokenEvent) -> None:
        """Store an event for the client, with packed log-probabilities; merge it into the last if many wait."""
        if self._aborting is not None:
            return
        at = time.perf_counter()
        last, packed = self._last.get(index), PackedLogprobs(event.logprobs)
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
        """Drop everything that waits for the client."""
        self._arrivals.clear()
        self._last.clear()
        self._num_waiting.clear()
        self._num_bytes = 0
        self._unread.hold(self, 0)

    def _put(self, arrival: Arrival) -> None:
        self._arrivals.append(arrival)
        self.wake()

    def wake(self) -> None:
        """Make `next` return immediately."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _joined(before: TokenEvent, event: TokenEvent, packed: PackedLogprobs) -> TokenEvent:
    """Merge two events of one choice. Extends the packed log-probabilities of the first."""
    logprobs = before.logprobs
    if isinstance(logprobs, PackedLogprobs):
        logprobs.extend(packed)
    return replace(
        event,
        token_ids=before.token_ids + event.token_ids,
        logprobs=logprobs,
        prompt_logprobs=before.prompt_logprobs or event.prompt_logprobs,
    )
