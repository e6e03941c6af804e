"""Drives a client with a workload: a number of requests in flight (closed loop), or given times (open loop)."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from benchmarks.load.summary import RequestRecord
from benchmarks.load.workload import Prompt, RequestPlan, Workload

OnDone = Callable[[RequestRecord], None]


class LoadClient(Protocol):
    """What sends requests; see `CompletionClient`."""

    def body(self, prompt: Prompt, output_len: int) -> bytes: ...

    async def complete(self, plan: RequestPlan, record: RequestRecord, body: bytes | None = None) -> None: ...


class Load:
    """One run. `records` holds every request started so far, so that a cancelled run can report.

    `num_requests` and `duration_s` bound the requests that start (0: no bound); all that start are finished. They are
    the workload's requests from `first_index` on.
    """

    def __init__(
        self,
        client: LoadClient,
        workload: Workload,
        *,
        num_requests: int = 0,
        duration_s: float = 0.0,
        first_index: int = 0,
        on_done: OnDone | None = None,
    ) -> None:
        self.records: list[RequestRecord] = []
        self._client, self._workload, self._on_done = client, workload, on_done
        self._indexes = iter(range(first_index, first_index + num_requests) if num_requests else itertools.count())
        self._duration_s = duration_s

    async def closed_loop(self, concurrency: int) -> None:
        """`concurrency` users, each of which sends its next request after the last answer."""
        end = time.perf_counter() + self._duration_s if self._duration_s else float("inf")

        async def user() -> None:
            for index in self._indexes:
                if time.perf_counter() >= end:
                    return
                await self._send(index)

        async with asyncio.TaskGroup() as users:
            for _ in range(concurrency):
                users.create_task(user())

    async def open_loop(self, arrivals: Iterable[float]) -> None:
        """Requests start at `arrivals` (seconds from now, ascending), however many are in flight."""
        begin = time.perf_counter()
        async with asyncio.TaskGroup() as requests:
            for index, arrival in zip(self._indexes, arrivals, strict=False):
                if self._duration_s and arrival >= self._duration_s:
                    break
                plan = self._workload.request(index)  # built before it is due
                body = self._client.body(plan.prompt, plan.output_len)
                await asyncio.sleep(max(0.0, begin + arrival - time.perf_counter()))
                record = self._record(index)
                record.late_s = time.perf_counter() - begin - arrival
                requests.create_task(self._complete(plan, record, body))

    async def _send(self, index: int) -> None:
        plan = self._workload.request(index)
        await self._complete(plan, self._record(index), self._client.body(plan.prompt, plan.output_len))

    def _record(self, index: int) -> RequestRecord:
        record = RequestRecord(index)
        self.records.append(record)
        return record

    async def _complete(self, plan: RequestPlan, record: RequestRecord, body: bytes) -> None:
        await self._client.complete(plan, record, body)
        if self._on_done is not None:
            self._on_done(record)
