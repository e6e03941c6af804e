"""A bound on the time that each turn of the event loop spends on writing log-probabilities."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")

TURN_S = 0.01
"""Time for jobs in one turn, in seconds. To write a token with 20 alternatives takes 10 to 20 microseconds."""


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
