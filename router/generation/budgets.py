"""Bounds on what all unfinished answers of this process take together: memory, and time of the event loop.

The event loop owns each of them.
"""

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
"""Maximum number of prompt log-probabilities of one answer, alternatives included."""
MAX_HELD_LOGPROBS = 2_000_000
"""Maximum number of prompt log-probabilities of all unfinished answers."""
MAX_UNREAD_BYTES = 256 * 1024 * 1024
"""A million tokens with 20 log-probabilities each, or six million without."""
TURN_S = 0.01
"""Time for jobs in one turn, in seconds. To write a token with 20 alternatives takes 10 to 20 microseconds."""


class LogprobBudget:
    """Bounds the prompt log-probabilities of unfinished answers, about 100 bytes each."""

    def __init__(self, most: int = MAX_HELD_LOGPROBS) -> None:
        self._most, self._held = most, 0

    @contextmanager
    def lease(self, num_logprobs: int) -> Iterator[None]:
        """Hold room for the log-probabilities of an answer's prompts while it is made. Raises Unavailable."""
        if num_logprobs and self._held + num_logprobs > self._most:
            raise Unavailable(
                f"{self._held:,} log-probabilities of prompts are under way, {num_logprobs:,} more would exceed the "
                f"{self._most:,} that this router holds",
                retry_after_s=RETRY_AFTER_S,
            )
        self._held += num_logprobs
        try:
            yield
        finally:
            self._held -= num_logprobs


class Reader(Protocol):
    """An answer whose client reads it."""

    def give_up(self, error: RequestError) -> None:
        """Drop what waits for the client, and send the error instead."""


class UnreadBudget:
    """Bounds the bytes that wait for slow clients. Above the bound, it gives up the answer that holds most."""

    def __init__(self, most: int = MAX_UNREAD_BYTES) -> None:
        self._most = most
        self._held: dict[Reader, int] = {}
        self.num_bytes = 0

    def hold(self, reader: Reader, num_bytes: int) -> None:
        """`num_bytes` of an answer wait for its client now."""
        self.num_bytes += num_bytes - self._held.pop(reader, 0)
        if num_bytes:
            self._held[reader] = num_bytes
        if self.num_bytes > self._most:
            slowest = max(self._held, key=self._held.__getitem__)
            held = self._held[slowest]
            error = Unavailable(
                f"the client reads too slowly: {held:,} bytes of its answer wait for it, of {self.num_bytes:,} in "
                f"all, and this router holds {self._most:,}",
                retry_after_s=RETRY_AFTER_S,
            )
            self.hold(slowest, 0)
            slowest.give_up(error)


class TurnBudget:
    """Runs jobs of many answers in FIFO order, for about `turn_s` seconds in each turn of the event loop that owns it.

    Without a bound, all answers with new tokens would be written before the loop serves anything else. A job that has
    begun is not interrupted.
    """

    def __init__(self, turn_s: float = TURN_S, clock: Callable[[], float] = time.perf_counter) -> None:
        self._turn_s, self._clock = turn_s, clock
        self._spent_s = 0.0
        self._jobs: deque[tuple[Callable[[], Any], asyncio.Future[Any]]] = deque()
        self._ends_turn = False

    @property
    def has_time(self) -> bool:
        """Whether a job would run at once."""
        return self._spent_s < self._turn_s and not self._jobs

    async def run(self, job: Callable[[], Result]) -> Result:
        """Run a job now or in a later turn, and return its result. The job is dropped if its caller is cancelled."""
        if self.has_time:
            return self.run_now(job)
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._jobs.append((job, future))
        return await future

    def run_now(self, job: Callable[[], Result]) -> Result:
        """Run a job in this turn even if no time is left, and count its time."""
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
            if future.done():  # its caller was cancelled
                continue
            try:
                future.set_result(self.run_now(job))
            except Exception as error:
                future.set_exception(error)
        if self._jobs:
            self._plan_turn()
