"""Works one batch off, from wherever it is.

validating ─> in_progress ─> finalizing ─> completed
    └─> failed    ├─ cancelling ─> cancelled: answers under way are stored
                  ├─ its time is over ─> expired: the rest is in the error file
                  └─ the router ends ─> in_progress: whichever router looks next goes on behind the stored results
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing

from common.machine import AGES_S
from router.api.batches.asker import KeyGone, LineAsker, ModelAway
from router.api.batches.batch_format import BatchResult
from router.api.batches.halt import Halt, Halted
from router.api.batches.lines import ENVELOPE_BYTES, InputLine, judge, lines_of, parsed
from router.generation import FrontDoor
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
"""Requests of a batch, as at OpenAI."""
STORE_RETRY_S = 2.0
"""Between two tries to store a result that the store could not take."""
AWAY_S = 1.0
"""Between two looks whether a model has workers again, for which lines were put off."""
EXPIRED_A_TIME = 200
"""Lines without an answer that are written at once when a batch's time is over."""
EXPIRED_TEXT = "the batch's completion window ended before this request had an answer"


class BatchRun:
    """The work on one batch by this router, which has its lease."""

    def __init__(self, door: FrontDoor, store: FileStore, asker: LineAsker, batch: StoredBatch) -> None:
        self._door, self._store, self._asker, self.batch = door, store, asker, batch
        self._turn = asyncio.Lock()
        self._away: set[str] = set()  # models whose lines were put off
        self._timer: asyncio.TimerHandle | None = None
        self.halt = Halt()

    async def run(self) -> None:
        """Work until the batch has ended, or is another router's."""
        self._look_at_clock()
        try:
            await self._work()
        except StoreFull as full:
            await self._fail("file_storage_full", str(full))
        except KeyGone:
            await self._fail("key_not_found", "the API key that made this batch no longer exists")
        except StoreFailed as failed:  # counted; the batch is taken up again once its lease has run out
            log.warning("a batch stops for now: %s", failed, extra={"batch": self.batch.id})
        except Exception:
            log.exception("a batch failed", extra={"batch": self.batch.id})
            await self._fail("internal_error", "the server failed to work on this batch")
        finally:
            if self._timer is not None:
                self._timer.cancel()
            self._store.batches.stop_renewing(self.batch)

    def _look_at_clock(self) -> None:
        """Halt once the window has passed by the earliest possible time. Repeats while the clock is in doubt."""
        left_s = self.batch.expires_at - self._store.batches.clock.earliest(AGES_S)
        if left_s <= 0:
            self.halt.set(Halted.EXPIRED, abort=True)
        else:
            self._timer = asyncio.get_running_loop().call_later(min(left_s, AGES_S), self._look_at_clock)

    async def _work(self) -> None:
        batches, halt = self._store.batches, self.halt
        log.info("batch", extra=_facts(self.batch))
        if self.batch.status == VALIDATING and not await self._validate():
            return
        if not halt.stops:
            await self._ask_all()
        if halt.leaves:
            return
        status = COMPLETED
        if halt.reason is Halted.CANCELLED:
            status = CANCELLED
        elif halt.reason is Halted.EXPIRED:
            if self.batch.num_total:
                await self._give_up_the_rest()
            status = EXPIRED
        if await batches.finalize(self.batch):
            self._ended(await batches.end(self.batch, status))

    async def _fail(self, code: str, message: str) -> None:
        """End the batch with what it has, for a reason that is none of its lines'."""
        try:
            self._ended(await self._store.batches.end(self.batch, FAILED, [BatchProblem(code, message)]))
        except StoreFailed as failed:
            log.warning("a batch could not be ended: %s", failed, extra={"batch": self.batch.id})

    def _ended(self, batch: StoredBatch | None) -> None:
        if batch is not None:
            self.batch = batch
            log.info("batch", extra=_facts(batch))

    # ------------------------------------------------------------ validating

    async def _validate(self) -> bool:
        """Whether the batch goes on: its lines are in order, and it is this router's."""
        config, batches = self._door.config, self._store.batches
        async with aclosing(self._raw_lines()) as lines:
            report = await judge(
                lines,
                self.batch.endpoint,
                self._door.models.checked_name,
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
            self.halt.set(Halted.LOST)
            return False
        self.batch = begun
        return True

    # ------------------------------------------------------------ in progress

    async def _ask_all(self) -> None:
        """Answer every line without a result, those of models without workers when these are back.

        Raises the first error of those that do it.
        """
        while not self.halt.stops:
            self._away.clear()
            await self._ask_once()
            if not self._away:
                return
            while not self.halt.stops and all(map(self._asker.is_away, self._away)):
                await self.halt.pause(AWAY_S)

    async def _ask_once(self) -> None:
        async with aclosing(self._unanswered()) as lines:
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(min(self._asker.num_places, self.batch.num_total)):
                        group.create_task(self._ask_some(lines), name=f"{self.batch.id}-lines")
            except ExceptionGroup as errors:  # the first ended the others
                raise errors.exceptions[0] from errors

    async def _ask_some(self, lines: AsyncIterator[InputLine]) -> None:
        while not self.halt.stops:
            async with self._turn:
                line = await anext(lines, None)
            if line is None:
                return
            try:
                result = await self._asker.result(line, self.batch, self.halt)
            except ModelAway as away:
                self._away.add(away.model)
                continue
            if result is not None:
                await self._keep([result])

    async def _keep(self, results: Sequence[LineResult]) -> None:
        """Store results, however long that takes: nothing is answered meanwhile. Raises StoreFull, StoreFailed."""
        while True:
            try:
                if not await self._store.batches.add(self.batch, results):
                    self.halt.set(Halted.LOST, abort=True)
                return
            except StoreFailed:
                if self.halt.aborts:
                    raise
                await asyncio.sleep(STORE_RETRY_S)

    async def _give_up_the_rest(self) -> None:
        """Say of every line without a result that its time is over."""
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
        max_bytes = self._door.config.max_body_bytes + ENVELOPE_BYTES
        return lines_of(self._store, self.batch.input_file, max_bytes)

    async def _unanswered(self) -> AsyncGenerator[InputLine, None]:
        """The lines that have no result yet, in order. All were valid when the batch began."""
        done = await self._store.batches.finished(self.batch)
        async with aclosing(self._raw_lines()) as lines:
            async for number, line in lines:
                if line is not None and number not in done:
                    yield await parsed(number, line, self.batch.endpoint)


def _facts(batch: StoredBatch) -> dict[str, object]:
    """A batch's line in the log."""
    facts: dict[str, object] = {"id": batch.id, "status": batch.status, "path": batch.endpoint, "key": batch.owner}
    if batch.num_total:
        facts |= {"lines": batch.num_total, "completed": batch.num_completed, "failed": batch.num_failed}
    if batch.has_ended:
        facts |= {"total_s": round(time.time() - batch.created_at, 3), "output": batch.usage.output_tokens}
        if batch.problems:
            facts |= {"problem": batch.problems[0].code}
    return facts
