"""The uploaded files and the batches of this router."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from contextlib import suppress

from starlette.requests import Request

from common.errors import InvalidRequest, Overloaded, quoted
from router.api.batches.errors import UnknownBatch, UnknownFile, answered
from router.api.batches.fields import WINDOW_S, NewBatch
from router.api.batches.halt import HaltReason
from router.api.batches.line_executor import Answer, LineExecutor
from router.api.batches.run import BatchRun
from router.api.batches.upload import Upload, Uploads
from router.generation import RouterState
from router.stored import (
    BATCH_INPUT,
    CANCELLING,
    VALIDATING,
    BatchChanges,
    FileStore,
    StoredBatch,
    StoredFile,
    StoreFailed,
)

log = logging.getLogger(__name__)

MAX_UNFINISHED = 64
"""Maximum number of unfinished batches. One key may have half of them."""
RETRY_AFTER_S = 60.0
"""Retry hint for a full batch list. Batches take minutes."""
GIVE_UP_S = 5.0
"""Maximum time, in seconds, for aborting lines during shutdown."""


class BatchService:
    """Files and batches of one application. `answer` is the ASGI application of its generation endpoints."""

    def __init__(self, router_state: RouterState, store: FileStore, answer: Answer) -> None:
        self._router_state, self.store = router_state, store
        self._executor = LineExecutor(router_state, answer)
        self._uploads = Uploads()
        self._runs: dict[str, BatchRun] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = False

    @property
    def running(self) -> tuple[int, int]:
        """The number of batches that this router processes, and of their lines that are being executed."""
        return len(self._runs), self._executor.num_running_lines

    # ------------------------------------------------------------ files

    async def file(self, file_id: str, owner: str, *, param: str | None = None) -> StoredFile:
        """Return a file of this key. Raises RequestError."""
        file = await answered(self.store.find(file_id, owner))
        if file is None:
            raise UnknownFile(file_id, param=param)
        return file

    async def upload(self, request: Request, owner: str) -> StoredFile:
        """Store the file in the request's form. Raises RequestError."""
        self._router_state.check_stays()
        with self._uploads.place(owner):
            now = time.time()
            file = StoredFile(new_file_id(), owner, BATCH_INPUT, "", now, now + self.store.max_age_s)
            return await Upload(self.store, file, self._router_state.config.max_file_mib * 2**20).read(request)

    async def delete_file(self, file_id: str, owner: str) -> None:
        """Delete a file. Raises RequestError."""
        if not await answered(self.store.delete(file_id, owner)):
            raise UnknownFile(file_id)

    async def files(
        self, owner: str, *, purpose: str | None, descending: bool, limit: int, after: str | None
    ) -> list[StoredFile]:
        """Return a page of this key's files. Raises RequestError."""
        page = self.store.page(owner, purpose=purpose, descending=descending, limit=limit, after=after)
        found = await answered(page)
        if found is None:
            raise InvalidRequest(f"after: the file {quoted(after or '')} is not in this list", param="after")
        return found

    # ------------------------------------------------------------ batches

    async def create(self, fields: NewBatch, owner: str) -> StoredBatch:
        """Create a batch and start processing it. Raises RequestError."""
        self._router_state.check_stays()
        file = await self.file(fields.input_file_id, owner, param="input_file_id")
        if file.purpose != BATCH_INPUT:
            raise InvalidRequest(
                f"input_file_id: the purpose of the file must be {BATCH_INPUT!r}, got {file.purpose!r}",
                param="input_file_id",
            )
        store, now, expiry = self.store, time.time(), fields.output_expires_after
        batch = StoredBatch(
            id=f"batch_{uuid.uuid4().hex}",
            owner=owner,
            status=VALIDATING,
            endpoint=fields.endpoint,
            input_file=file.id,
            output_file=new_file_id(),
            error_file=new_file_id(),
            created_at=now,
            expires_at=now + WINDOW_S,
            result_s=store.max_age_s if expiry is None else min(store.max_age_s, expiry.seconds),
            metadata=fields.metadata,
        )
        self._loop = asyncio.get_running_loop()
        await answered(store.batches.create(batch, lambda total, own: self._check_capacity(owner, total, own)))
        self._begin(batch)
        return batch

    async def batch(self, batch_id: str, owner: str) -> StoredBatch:
        """Return the current state of a batch of this key. Raises RequestError."""
        batch = await answered(self.store.batches.find(batch_id, owner))
        if batch is None:
            raise UnknownBatch(batch_id)
        return batch

    async def batches(self, owner: str, *, limit: int, after: str | None) -> list[StoredBatch]:
        """Return a page of this key's batches, newest first. Raises RequestError."""
        found = await answered(self.store.batches.page(owner, limit=limit, after=after))
        if found is None:
            raise InvalidRequest(f"after: the batch {quoted(after or '')} is not in this list", param="after")
        return found

    async def cancel(self, batch_id: str, owner: str) -> StoredBatch:
        """Cancel a batch, unless it has ended. Its running lines are completed. Raises RequestError."""
        batch = await answered(self.store.batches.cancel(batch_id, owner))
        if batch is None:
            raise UnknownBatch(batch_id)
        if batch.status == CANCELLING and batch_id in self._runs:
            self._runs[batch_id].halt.set(HaltReason.CANCELLED)
        return batch

    # ------------------------------------------------------------ the router's life

    def start(self) -> None:
        """Start to claim and process batches that no router is processing."""
        self._loop = asyncio.get_running_loop()
        self.store.batches.on_news = self._pass_on
        self.store.batches.max_claimed = MAX_UNFINISHED
        self._keep(asyncio.create_task(self._look(), name="batches-look"))

    def drain(self) -> None:
        """Start no new lines, and claim no batches. Running lines get the same time as other requests."""
        self._stopping = True
        self.store.batches.max_claimed = 0
        for run in self._runs.values():
            run.halt.set(HaltReason.DRAINING)

    async def stop(self) -> None:
        """Abort running lines and release the batches for other routers."""
        self.drain()
        for run in self._runs.values():
            run.halt.set(HaltReason.DRAINING, abort=True)
        if self._tasks:
            _, late = await asyncio.wait(set(self._tasks), timeout=GIVE_UP_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        with suppress(StoreFailed):  # already counted; the leases expire
            await self.store.batches.release()

    async def close(self) -> None:
        """Stop, and close the store after its last write."""
        await self.stop()
        self._loop = None
        await asyncio.to_thread(self.store.close)

    # ------------------------------------------------------------ inside

    def _check_capacity(self, owner: str, total: int, own: int) -> None:
        """Raise Overloaded if all keys together, or this key, already have the maximum of unfinished batches."""
        most = MAX_UNFINISHED
        share = most if not owner else max(1, most // 2)
        if total >= most or own >= share:
            raise Overloaded(
                f"Too many unfinished batches: {total:,} in total, {own:,} of this key. The limits are {most:,} in "
                f"total and {share:,} per key.",
                retry_after_s=RETRY_AFTER_S,
            )

    async def _look(self) -> None:
        with suppress(StoreFailed):  # already counted; the next poll follows in seconds
            await self.store.batches.look()

    def _pass_on(self, news: BatchChanges) -> None:
        """Pass news from the store's thread to the event loop."""
        loop = self._loop
        if loop is not None and (news.claimed or news.cancelled or news.lost):
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._on_news, news)

    def _on_news(self, news: BatchChanges) -> None:
        for name in news.lost:
            if name in self._runs:
                self._runs[name].halt.set(HaltReason.LOST, abort=True)
        for batch in news.claimed:
            self._begin(batch)
        for name in news.cancelled:
            if name in self._runs:
                self._runs[name].halt.set(HaltReason.CANCELLED)

    def _begin(self, batch: StoredBatch) -> None:
        if self._stopping or batch.id in self._runs:
            self.store.batches.stop_renewing(batch)  # the lease expires, and a router claims the batch again
            return
        run = self._runs[batch.id] = BatchRun(self._router_state, self.store, self._executor, batch)
        if batch.status == CANCELLING:
            run.halt.set(HaltReason.CANCELLED)
        task = asyncio.create_task(run.run(), name=batch.id)
        task.add_done_callback(lambda _: self._runs.pop(batch.id, None))
        self._keep(task)

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("processing of a batch failed", exc_info=task.exception())


def new_file_id() -> str:
    """Generate a random file id that cannot be guessed."""
    return f"file-{uuid.uuid4().hex}"
