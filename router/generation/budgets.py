"""Process-wide limits over all unfinished answers: memory, and event loop time. Use only from the event loop."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from common.errors import RETRY_AFTER_S, RequestError, Unavailable

Result = TypeVar("Result")

MAX_PROMPT_LOGPROBS = 500_000
"""Maximum number of prompt log-probabilities in one answer, including alternatives."""
MAX_HELD_LOGPROBS = 2_000_000
"""Maximum number of prompt log-probabilities in all unfinished answers."""
MAX_UNREAD_BYTES = 256 * 1024 * 1024
"""Enough for 1 million tokens with 20 log-probabilities each, or 6 million tokens without."""
TURN_S = 0.01
"""Seconds of jobs per event loop iteration. Writing one token with 20 alternatives takes 10 to 20 microseconds."""


class LogprobBudget:
    """Limit on the prompt log-probabilities of all unfinished answers. Each takes about 100 bytes."""

    def __init__(self, most: int = MAX_HELD_LOGPROBS) -> None:
        self._most, self._held = most, 0

    @contextmanager
    def lease(self, num_logprobs: int) -> Iterator[None]:
        """Reserve capacity for an answer's prompt log-probabilities while the block runs. Raises Unavailable."""
        if num_logprobs and self._held + num_logprobs > self._most:
            raise Unavailable(
                f"Unfinished answers use {self._held:,} of the {self._most:,} prompt log-probabilities that this "
                f"router allows; {num_logprobs:,} more do not fit.",
                retry_after_s=RETRY_AFTER_S,
            )
        self._held += num_logprobs
        try:
            yield
        finally:
            self._held -= num_logprobs


class Reader(Protocol):
    """A client connection with an unfinished answer."""

    def give_up(self, error: RequestError) -> None:
        """Drop the unsent data and send the error instead."""


class UnreadBudget:
    """Limit on the bytes that wait for slow clients. Above it, the answer with the most unread bytes is aborted."""

    def __init__(self, most: int = MAX_UNREAD_BYTES) -> None:
        self._most = most
        self._held: dict[Reader, int] = {}
        self.num_bytes = 0

    def hold(self, reader: Reader, num_bytes: int) -> None:
        """Set the number of unread bytes of an answer to `num_bytes`."""
        self.num_bytes += num_bytes - self._held.pop(reader, 0)
        if num_bytes:
            self._held[reader] = num_bytes
        if self.num_bytes > self._most:
            slowest = max(self._held, key=self._held.__getitem__)
            held = self._held[slowest]
            error = Unavailable(
                f"The client reads too slowly: {held:,} bytes of its answer are unread, of {self.num_bytes:,} for all "
                f"clients; this router allows {self._most:,}",
                retry_after_s=RETRY_AFTER_S,
            )
            self.hold(slowest, 0)
            slowest.give_up(error)


class LoopTimeBudget:
    """Runs jobs of many answers in FIFO order, for about `turn_s` seconds per iteration of the event loop.

    Without this limit, the loop would write all answers with new tokens before it serves anything else. A running job
    is not interrupted.
    """

    def __init__(self, turn_s: float = TURN_S, clock: Callable[[], float] = time.perf_counter) -> None:
        self._turn_s, self._clock = turn_s, clock
        self._spent_s = 0.0
        self._jobs: deque[tuple[Callable[[], Any], asyncio.Future[Any]]] = deque()
        self._ends_turn = False

    @property
    def has_time(self) -> bool:
        """Whether a job would run immediately."""
        return self._spent_s < self._turn_s and not self._jobs

    async def run(self, job: Callable[[], Result]) -> Result:
        """Run a job now or in a later iteration and return its result. Dropped if the caller is cancelled."""
        if self.has_time:
            return self.run_now(job)
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._jobs.append((job, future))
        return await future

    def run_now(self, job: Callable[[], Result]) -> Result:
        """Run a job immediately, even if the time is used up, and count its time."""
        began = self._clock()
        try:
            return job()
        finally:
            self._spent_s += self._clock() - began
            self._plan_turn()

    def _plan_turn(self) -> None:
        if not self._ends_turn:
            self._ends_turn = True
            asyncio.get_running_loop().call_soon(self._begin_turn)

    def _begin_turn(self) -> None:
        self._ends_turn, self._spent_s = False, 0.0
        while self._jobs and self._spent_s < self._turn_s:
            job, future = self._jobs.popleft()
            if future.done():  # the caller was cancelled
                continue
            try:
                future.set_result(self.run_now(job))
            except Exception as error:
                future.set_exception(error)
        if self._jobs:
            self._plan_turn()
