"""The files that clients uploaded, and the batches over them, of which this router works on some."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from contextlib import suppress

from starlette.requests import Request

from common.errors import InvalidRequest, Overloaded, quoted
from router.api.batches.asker import Answer, LineAsker
from router.api.batches.errors import UnknownBatch, UnknownFile, answered
from router.api.batches.fields import WINDOW_S, NewBatch
from router.api.batches.halt import Halted
from router.api.batches.run import BatchRun
from router.api.batches.upload import Upload, Uploads
from router.generation import FrontDoor
from router.stored import (
    BATCH_INPUT,
    CANCELLING,
    VALIDATING,
    BatchNews,
    FileStore,
    StoredBatch,
    StoredFile,
    StoreFailed,
)

log = logging.getLogger(__name__)

MAX_UNFINISHED = 64
"""Batches that have not ended. One key may have half of them."""
RETRY_AFTER_S = 60.0
"""Batches end in minutes, and only then there is room for another."""
GIVE_UP_S = 5.0
"""How long batches may take to give up their lines when the router ends."""


class KeptBatches:
    """Owned by the application, whose endpoints of generation are `answer`."""

    def __init__(self, door: FrontDoor, store: FileStore, answer: Answer) -> None:
        self._door, self.store = door, store
        self._asker = LineAsker(door, answer)
        self._uploads = Uploads()
        self._runs: dict[str, BatchRun] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = False

    @property
    def running(self) -> tuple[int, int]:
        """The batches that this router works on, and their lines that are being answered."""
        return len(self._runs), self._asker.num_asking

    # ------------------------------------------------------------ files

    async def file(self, file_id: str, owner: str, *, param: str | None = None) -> StoredFile:
        """A file of this key. Raises RequestError."""
        file = await answered(self.store.find(file_id, owner))
        if file is None:
            raise UnknownFile(file_id, param=param)
        return file

    async def upload(self, request: Request, owner: str) -> StoredFile:
        """Keep the file in the request's form. Raises RequestError."""
        self._door.check_open()
        with self._uploads.place(owner):
            now = time.time()
            file = StoredFile(new_file_id(), owner, BATCH_INPUT, "", now, now + self.store.max_age_s)
            return await Upload(self.store, file, self._door.config.max_file_mib * 2**20).read(request)

    async def delete_file(self, file_id: str, owner: str) -> None:
        """Forget a file. Raises RequestError."""
        if not await answered(self.store.delete(file_id, owner)):
            raise UnknownFile(file_id)

    async def files(
        self, owner: str, *, purpose: str | None, descending: bool, limit: int, after: str | None
    ) -> list[StoredFile]:
        """A page of this key's files. Raises RequestError."""
        page = self.store.page(owner, purpose=purpose, descending=descending, limit=limit, after=after)
        found = await answered(page)
        if found is None:
            raise InvalidRequest(f"after: there is no file {quoted(after or '')} in this list", param="after")
        return found

    # ------------------------------------------------------------ batches

    async def create(self, fields: NewBatch, owner: str) -> StoredBatch:
        """A new batch, on which this router begins to work. Raises RequestError."""
        self._door.check_open()
        file = await self.file(fields.input_file_id, owner, param="input_file_id")
        if file.purpose != BATCH_INPUT:
            raise InvalidRequest(
                f"input_file_id: the file has the purpose {file.purpose!r}, and must have {BATCH_INPUT!r}",
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
        await answered(store.batches.create(batch, lambda total, own: self._check_room(owner, total, own)))
        self._begin(batch)
        return batch

    async def batch(self, batch_id: str, owner: str) -> StoredBatch:
        """A batch of this key as it is now. Raises RequestError."""
        batch = await answered(self.store.batches.find(batch_id, owner))
        if batch is None:
            raise UnknownBatch(batch_id)
        return batch

    async def batches(self, owner: str, *, limit: int, after: str | None) -> list[StoredBatch]:
        """A page of this key's batches, the latest first. Raises RequestError."""
        found = await answered(self.store.batches.page(owner, limit=limit, after=after))
        if found is None:
            raise InvalidRequest(f"after: there is no batch {quoted(after or '')} in this list", param="after")
        return found

    async def cancel(self, batch_id: str, owner: str) -> StoredBatch:
        """The batch, which ends once its answers under way are stored. One that ended stays. Raises RequestError."""
        batch = await answered(self.store.batches.cancel(batch_id, owner))
        if batch is None:
            raise UnknownBatch(batch_id)
        if batch.status == CANCELLING and batch_id in self._runs:
            self._runs[batch_id].halt.set(Halted.CANCELLED)
        return batch

    # ------------------------------------------------------------ the router's life

    def start(self) -> None:
        """Take up batches that no router works on, from now on."""
        self._loop = asyncio.get_running_loop()
        self.store.batches.on_news = self._pass_on
        self.store.batches.max_claimed = MAX_UNFINISHED
        self._keep(asyncio.create_task(self._look(), name="batches-look"))

    def drain(self) -> None:
        """Begin no more lines; those under way have the time of any other request."""
        self._stopping = True
        for run in self._runs.values():
            run.halt.set(Halted.DRAINING)

    async def stop(self) -> None:
        """Give up lines under way, and leave the batches to the next router."""
        self.drain()
        for run in self._runs.values():
            run.halt.set(Halted.DRAINING, abort=True)
        if self._tasks:
            _, late = await asyncio.wait(set(self._tasks), timeout=GIVE_UP_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        with suppress(StoreFailed):  # counted; the leases run out
            await self.store.batches.release()

    async def close(self) -> None:
        """Stop, and close the store behind the last write."""
        await self.stop()
        self._loop = None
        await asyncio.to_thread(self.store.close)

    # ------------------------------------------------------------ inside

    def _check_room(self, owner: str, total: int, own: int) -> None:
        """Raises Overloaded for another batch while as many as allowed have not ended, of all keys or of this one."""
        most = MAX_UNFINISHED
        share = most if not owner else max(1, most // 2)
        if total >= most or own >= share:
            raise Overloaded(
                f"{total:,} batches have not ended, {own:,} of them this key's; this router takes {most:,}, and "
                f"{share:,} of a key",
                retry_after_s=RETRY_AFTER_S,
            )

    async def _look(self) -> None:
        with suppress(StoreFailed):  # counted; the next look is seconds away
            await self.store.batches.look()

    def _pass_on(self, news: BatchNews) -> None:
        """What the store's thread found."""
        loop = self._loop
        if loop is not None and (news.claimed or news.cancelled or news.lost):
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._on_news, news)

    def _on_news(self, news: BatchNews) -> None:
        for name in news.lost:
            if name in self._runs:
                self._runs[name].halt.set(Halted.LOST, abort=True)
        for batch in news.claimed:
            self._begin(batch)
        for name in news.cancelled:
            if name in self._runs:
                self._runs[name].halt.set(Halted.CANCELLED)

    def _begin(self, batch: StoredBatch) -> None:
        if self._stopping or batch.id in self._runs:
            return  # `stop` leaves it to the next router; a run that ends lets its lease run out
        run = self._runs[batch.id] = BatchRun(self._door, self.store, self._asker, batch)
        if batch.status == CANCELLING:
            run.halt.set(Halted.CANCELLED)
        task = asyncio.create_task(run.run(), name=batch.id)
        task.add_done_callback(lambda _: self._runs.pop(batch.id, None))
        self._keep(task)

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("the work on a batch was lost", exc_info=task.exception())


def new_file_id() -> str:
    """A random id: it cannot be guessed."""
    return f"file-{uuid.uuid4().hex}"
