"""Processing of one batch, from any state.

validating ─> in_progress ─> finalizing ─> completed
    └─> failed    ├─ cancelling ─> cancelled: running lines are completed and stored
                  ├─ window ends ─> expired: the remaining lines are reported in the error file
                  └─ router stops ─> in_progress: the next router to claim the batch continues after the stored results
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from functools import partial

from common.machine import AGES_S
from router.api.batches.batch_format import BatchResult
from router.api.batches.halt import HaltReason, HaltSignal
from router.api.batches.line_executor import KeyDeleted, LineExecutor, NoWorkers
from router.api.batches.lines import ENVELOPE_BYTES, InputLine, lines_of, parsed, validate_lines
from router.generation import RouterState
from router.stored import (
    CANCELLED,
    COMPLETED,
    EXPIRED,
    FAILED,
    VALIDATING,
    BatchProblem,
    FileStore,
    LineResult,
    StoredBatch,
    StoreFailed,
    StoreFull,
)

log = logging.getLogger(__name__)

MAX_LINES = 50_000
"""Maximum number of requests in a batch, as in OpenAI's API."""
STORE_RETRY_S = 2.0
"""Delay before storing a result is retried."""
DEFERRED_POLL_S = 1.0
"""Polling interval for workers of models whose lines were deferred."""
EXPIRED_A_TIME = 200
"""Unanswered lines per write when a batch expires."""
EXPIRED_TEXT = "The completion window of the batch ended before this request was answered."


class BatchRun:
    """Processing of one batch by this router, which holds its lease."""

    def __init__(self, router_state: RouterState, store: FileStore, executor: LineExecutor, batch: StoredBatch) -> None:
        self._router_state, self._store, self._executor, self.batch = router_state, store, executor, batch
        self._turn = asyncio.Lock()
        self._deferred: set[str] = set()  # models whose lines were deferred
        self._timer: asyncio.TimerHandle | None = None
        self.halt = HaltSignal()

    async def run(self) -> None:
        """Process the batch until it ends or another router owns it."""
        self._look_at_clock()
        try:
            await self._work()
        except StoreFull as full:
            await self._fail("file_storage_full", str(full))
        except KeyDeleted:
            await self._fail("key_not_found", "The API key that created this batch no longer exists.")
        except StoreFailed as failed:  # already counted; a router claims the batch again when its lease has expired
            log.warning("batch interrupted, will be resumed: %s", failed, extra={"batch": self.batch.id})
        except Exception:
            log.exception("batch failed", extra={"batch": self.batch.id})
            await self._fail("internal_error", "The server failed to process this batch.")
        finally:
            if self._timer is not None:
                self._timer.cancel()
            self._store.batches.stop_renewing(self.batch)

    def _look_at_clock(self) -> None:
        """HaltSignal once the window has certainly passed. Repeats while the clock is uncertain."""
        left_s = self.batch.expires_at - self._store.batches.clock.earliest(AGES_S)
        if left_s <= 0:
            self.halt.set(HaltReason.EXPIRED, abort=True)
        else:
            self._timer = asyncio.get_running_loop().call_later(min(left_s, AGES_S), self._look_at_clock)

    async def _work(self) -> None:
        batches, halt = self._store.batches, self.halt
        log.info("batch", extra=_facts(self.batch))
        if self.batch.status == VALIDATING and not await self._validate():
            return
        if not halt.stops:
            await self._execute_all()
        if halt.leaves:
            return
        status = COMPLETED
        if halt.reason is HaltReason.CANCELLED:
            status = CANCELLED
        elif halt.reason is HaltReason.EXPIRED:
            if self.batch.num_total:
                await self._give_up_the_rest()
            status = EXPIRED
        if await batches.finalize(self.batch):
            self._ended(await batches.end(self.batch, status))

    async def _fail(self, code: str, message: str) -> None:
        """End the batch as failed, keeping its results."""
        try:
            self._ended(await self._store.batches.end(self.batch, FAILED, [BatchProblem(code, message)]))
        except StoreFailed as failed:
            log.warning("batch could not be marked as failed: %s", failed, extra={"batch": self.batch.id})

    def _ended(self, batch: StoredBatch | None) -> None:
        if batch is not None:
            self.batch = batch
            log.info("batch", extra=_facts(batch))

    # ------------------------------------------------------------ validating

    async def _validate(self) -> bool:
        """Validate the lines. Returns whether to continue: the lines are valid and this router owns the batch."""
        config, batches = self._router_state.config, self._store.batches
        key = self._router_state.access.key_of_owner(self.batch.owner)
        if key is None:
            raise KeyDeleted
        async with aclosing(self._raw_lines()) as lines:
            report = await validate_lines(
                lines,
                self.batch.endpoint,
                partial(self._router_state.models.checked_name, key=key),
                max_lines=MAX_LINES,
                max_bytes=config.max_body_bytes + ENVELOPE_BYTES,
                stopped=lambda: self.halt.stops,
            )
        if self.halt.stops:
            return not self.halt.leaves
        if report.problems:
            self._ended(await batches.end(self.batch, FAILED, report.problems))
            return False
        begun = await batches.begin(self.batch, report.num_lines, report.model)
        if begun is None:
            self.halt.set(HaltReason.LOST)
            return False
        self.batch = begun
        return True

    # ------------------------------------------------------------ in progress

    async def _execute_all(self) -> None:
        """Execute all lines without a result. Lines of models without workers are deferred until workers return.

        Raises the first error of the tasks that execute lines.
        """
        while not self.halt.stops:
            self._deferred.clear()
            await self._execute_once()
            if not self._deferred:
                return
            while not self.halt.stops and all(map(self._executor.is_deferred, self._deferred)):
                await self.halt.pause(DEFERRED_POLL_S)

    async def _execute_once(self) -> None:
        async with aclosing(self._unanswered()) as lines:
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(min(self._executor.max_lines, self.batch.num_total)):
                        group.create_task(self._execute_some(lines), name=f"{self.batch.id}-lines")
            except ExceptionGroup as errors:  # one failed, which cancelled the others
                raise errors.exceptions[0] from errors

    async def _execute_some(self, lines: AsyncIterator[InputLine]) -> None:
        while not self.halt.stops:
            async with self._turn:
                line = await anext(lines, None)
            if line is None:
                return
            try:
                result = await self._executor.result(line, self.batch, self.halt)
            except NoWorkers as no_workers:
                self._deferred.add(no_workers.model)
                continue
            if result is not None:
                await self._keep([result])

    async def _keep(self, results: Sequence[LineResult]) -> None:
        """Store results, with retries; the task executes no lines in the meantime. Raises StoreFull, StoreFailed."""
        while True:
            try:
                if not await self._store.batches.add(self.batch, results):
                    self.halt.set(HaltReason.LOST, abort=True)
                return
            except StoreFailed:
                if self.halt.aborts:
                    raise
                await asyncio.sleep(STORE_RETRY_S)

    async def _give_up_the_rest(self) -> None:
        """Store an expiry error for every line without a result."""
        results: list[LineResult] = []
        async with aclosing(self._unanswered()) as lines:
            async for line in lines:
                result = BatchResult(line.custom_id, 0, problem=EXPIRED_TEXT, code="batch_expired")
                results.append(LineResult(line.number, result.line(), is_good=False))
                if len(results) >= EXPIRED_A_TIME:
                    await self._keep(results)
                    results = []
        if results:
            await self._keep(results)

    # ------------------------------------------------------------ lines

    def _raw_lines(self) -> AsyncGenerator[tuple[int, bytes | None], None]:
        max_bytes = self._router_state.config.max_body_bytes + ENVELOPE_BYTES
        return lines_of(self._store, self.batch.input_file, max_bytes)

    async def _unanswered(self) -> AsyncGenerator[InputLine, None]:
        """Yield the lines without a result, in order. All lines were valid when the batch began."""
        done = await self._store.batches.finished(self.batch)
        async with aclosing(self._raw_lines()) as lines:
            async for number, line in lines:
                if line is not None and number not in done:
                    yield await parsed(number, line, self.batch.endpoint)


def _facts(batch: StoredBatch) -> dict[str, object]:
    """Return the log fields of a batch."""
    facts: dict[str, object] = {"id": batch.id, "status": batch.status, "path": batch.endpoint, "key": batch.owner}
    if batch.num_total:
        facts |= {"lines": batch.num_total, "completed": batch.num_completed, "failed": batch.num_failed}
    if batch.has_ended:
        facts |= {"total_s": round(time.time() - batch.created_at, 3), "output": batch.usage.output_tokens}
        if batch.problems:
            facts |= {"problem": batch.problems[0].code}
    return facts
