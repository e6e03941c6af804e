"""Stores batches: what they are, how far they are, and which router works on each.

A batch that has not ended has a lease, which its router renews. One whose lease ran out belongs to a router that ended;
the next router that looks takes it up. A router writes about a batch only while the lease is its own, so that of
two routers that believe to have a batch one alone gets on with it.
"""

from __future__ import annotations

import sqlite3
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import orjson

from common.machine import AGES_S, WallClock
from router.stored.database import LEASE_S, MAX_DELETED, Database, lease_bounds
from router.stored.records import (
    BATCH_OUTPUT,
    CANCELLED,
    CANCELLING,
    COMPLETED,
    EXPIRED,
    FINALIZING,
    IN_PROGRESS,
    READY,
    UNFINISHED,
    VALIDATING,
    WRITING,
    BatchNews,
    BatchProblem,
    BatchUsage,
    LineResult,
    StoredBatch,
)

COUNTS = "num_total, num_completed, num_failed, has_output, has_errors"
USAGE = "input_tokens, cached_tokens, output_tokens, reasoning_tokens"
COLUMNS = (
    "id, owner, status, endpoint, input_file, output_file, error_file, created_at, expires_at, result_s, details, "
    f"{COUNTS}, {USAGE}"
)
MARKS = ", ".join("?" * len(UNFINISHED))


class RoomCheck(Protocol):
    """`FileStore.check_room`."""

    def __call__(
        self, connection: sqlite3.Connection, owner: str, num_bytes: int, *, num_files: int = 0, results: bool = False
    ) -> None: ...


class BatchStore:
    """Works on the database of files. `on_news` gets `BatchNews` on the store's thread; `max_claimed` are the batches
    that this router works on at most: 0 until it wants any."""

    def __init__(
        self,
        database: Database,
        check_room: RoomCheck,
        *,
        max_entries: int,
        max_age_s: float,
        clock: WallClock,
    ) -> None:
        self._database, self._check_room, self.clock = database, check_room, clock
        self._max_entries, self._max_age_s = max_entries, max_age_s
        self._router = uuid.uuid4().hex
        self._mine: set[str] = set()  # the store's thread copies it before it looks
        self.max_claimed = 0
        self.on_news: Callable[[BatchNews], None] = lambda news: None

    # ------------------------------------------------------------ for clients

    async def create(self, batch: StoredBatch, allowed: Callable[[int, int], None]) -> None:
        """Store a new batch, which this router works on. Raises StoreFull, StoreFailed, and what `allowed` raises: it
        gets the number of batches that have not ended, and of those that are the key's own."""

        def work(connection: sqlite3.Connection) -> None:
            statement = f"SELECT count(*), coalesce(sum(owner = ?), 0) FROM batches WHERE status IN ({MARKS})"
            allowed(*connection.execute(statement, (batch.owner, *UNFINISHED)).fetchone())
            self._check_room(connection, batch.owner, 0, num_files=2)
            for file in (batch.output_file, batch.error_file):
                connection.execute(
                    "INSERT INTO files VALUES (?, ?, ?, ?, ?, ?, 0, ?)",
                    (file, batch.owner, BATCH_OUTPUT, "", batch.created_at, batch.expires_at, WRITING),
                )
            marks = ", ".join("?" * 22)
            values = (batch.id, batch.owner, batch.status, batch.endpoint, batch.input_file, batch.output_file)
            counts = (0,) * 9
            more = (batch.error_file, batch.created_at, batch.expires_at, batch.result_s, batch.details, *counts)
            connection.execute(
                f"INSERT INTO batches ({COLUMNS}, router, lease_until) VALUES ({marks})",
                (*values, *more, self._router, self.clock.now() + LEASE_S),
            )
            self._mine.add(batch.id)
            self._make_room(connection)

        await self._database.run(work)

    async def find(self, batch_id: str, owner: str) -> StoredBatch | None:
        """A batch as it is now. Raises StoreFailed."""
        return await self._database.run(lambda connection: self._find(connection, batch_id, owner))

    async def page(self, owner: str, *, limit: int, after: str | None) -> list[StoredBatch] | None:
        """At most `limit` batches, the latest first, those after the batch `after`; None without such a batch.

        Raises StoreFailed.
        """

        def work(connection: sqlite3.Connection) -> list[StoredBatch] | None:
            place: tuple[object, ...] = ()
            if after is not None:
                if (last := self._find(connection, after, owner)) is None:
                    return None
                place = (last.created_at, last.id)
            rows = connection.execute(
                f"SELECT {COLUMNS} FROM batches WHERE owner = ?"
                + (" AND (created_at, id) < (?, ?)" if place else "")
                + " ORDER BY created_at DESC, id DESC LIMIT ?",
                (owner, *place, limit),
            )
            return [_batch(row) for row in rows]

        return await self._database.run(work)

    async def cancel(self, batch_id: str, owner: str) -> StoredBatch | None:
        """The batch, which its router will end if it has not ended. Raises StoreFailed."""

        def work(connection: sqlite3.Connection) -> StoredBatch | None:
            batch = self._find(connection, batch_id, owner)
            if batch is not None and batch.status in (VALIDATING, IN_PROGRESS):
                self._move(connection, batch, CANCELLING)
            return self._find(connection, batch_id, owner)

        return await self._database.run(work)

    # ------------------------------------------------------------ for the router that works on a batch

    async def begin(self, batch: StoredBatch, num_total: int, model: str | None) -> StoredBatch | None:
        """The batch is valid. What it is now; None when it is no longer this router's. Raises StoreFailed."""

        def work(connection: sqlite3.Connection) -> StoredBatch | None:
            if (found := self._own(connection, batch.id)) is None:
                return None
            connection.execute("UPDATE batches SET num_total = ? WHERE id = ?", (num_total, batch.id))
            status = IN_PROGRESS if found.status == VALIDATING else found.status
            self._move(connection, replace(found, model=model), status)
            return self._own(connection, batch.id)

        return await self._database.run(work)

    async def finished(self, batch: StoredBatch) -> set[int]:
        """The lines of the input that have a result. Raises StoreFailed."""
        statement = "SELECT number FROM pieces WHERE file IN (?, ?)"
        files = (batch.output_file, batch.error_file)
        return await self._database.run(
            lambda connection: {number for (number,) in connection.execute(statement, files)}
        )

    async def add(self, batch: StoredBatch, results: Sequence[LineResult]) -> bool:
        """Store results and count them; False when the batch is no longer this router's.

        Raises StoreFull, StoreFailed.
        """
        num_bytes = sum(len(result.line) for result in results)

        def work(connection: sqlite3.Connection) -> bool:
            if self._own(connection, batch.id) is None:
                return False
            self._check_room(connection, batch.owner, num_bytes, results=True)
            for result in results:
                file = batch.output_file if result.is_good else batch.error_file
                added = connection.execute(
                    "INSERT OR IGNORE INTO pieces VALUES (?, ?, ?)", (file, result.number, result.line)
                )
                if not added.rowcount:  # a try that was thought to have failed
                    continue
                connection.execute("UPDATE files SET num_bytes = num_bytes + ? WHERE id = ?", (len(result.line), file))
                used = result.usage
                connection.execute(
                    "UPDATE batches SET num_completed = num_completed + ?, num_failed = num_failed + ?, "
                    "input_tokens = input_tokens + ?, cached_tokens = cached_tokens + ?, "
                    "output_tokens = output_tokens + ?, reasoning_tokens = reasoning_tokens + ? WHERE id = ?",
                    (
                        *(result.is_good, not result.is_good, used.input_tokens, used.cached_tokens),
                        *(used.output_tokens, used.reasoning_tokens, batch.id),
                    ),
                )
            return True

        return await self._database.run(work, num_bytes)

    async def finalize(self, batch: StoredBatch) -> bool:
        """Its last line is done; False when it is no longer this router's. Raises StoreFailed."""

        def work(connection: sqlite3.Connection) -> bool:
            found = self._own(connection, batch.id)
            if found is not None and found.status == IN_PROGRESS:
                self._move(connection, found, FINALIZING)
            return found is not None

        return await self._database.run(work)

    async def end(self, batch: StoredBatch, status: str, problems: Sequence[BatchProblem] = ()) -> StoredBatch | None:
        """Give the batch its last status, and clients its results. None when it is no longer this router's.

        Raises StoreFailed.
        """

        def work(connection: sqlite3.Connection) -> StoredBatch | None:
            if (found := self._own(connection, batch.id)) is None:
                return None
            last = CANCELLED if status == COMPLETED and found.status == CANCELLING else status
            if last in (COMPLETED, EXPIRED) and FINALIZING not in found.times:
                found = self._move(connection, found, FINALIZING)
            has_output = self._publish(connection, found, found.output_file, f"{batch.id}_output.jsonl")
            has_errors = self._publish(connection, found, found.error_file, f"{batch.id}_error.jsonl")
            self._move(connection, replace(found, problems=problems), last)
            connection.execute(
                "UPDATE batches SET has_output = ?, has_errors = ?, router = '', lease_until = 0 WHERE id = ?",
                (has_output, has_errors, batch.id),
            )
            self._mine.discard(batch.id)
            return self._find(connection, batch.id, batch.owner)

        return await self._database.run(work)

    def stop_renewing(self, batch: StoredBatch) -> None:
        """Renew the lease of a batch no more. Never waits."""
        self._mine.discard(batch.id)

    async def release(self) -> None:
        """Leave all batches to whichever router looks next. Raises StoreFailed."""
        self.max_claimed = 0

        def work(connection: sqlite3.Connection) -> None:
            statement = "UPDATE batches SET router = '', lease_until = 0 WHERE router = ?"
            connection.execute(statement, (self._router,))
            self._mine.clear()

        await self._database.run(work)

    async def look(self) -> None:
        """Look for batches to take up now. Raises StoreFailed."""
        await self._database.run(self.look_around)

    # ------------------------------------------------------------ inside a transaction

    def look_around(self, connection: sqlite3.Connection) -> None:
        """Renew leases, claim batches that no router works on, and delete what is too old."""
        now = self.clock.now()
        lost = set()
        for name in list(self._mine):
            renewed = connection.execute(
                "UPDATE batches SET lease_until = ? WHERE id = ? AND router = ?", (now + LEASE_S, name, self._router)
            )
            if not renewed.rowcount:
                lost.add(name)
        self._mine -= lost
        asked = connection.execute(
            "SELECT id FROM batches WHERE status = ? AND router = ?", (CANCELLING, self._router)
        ).fetchall()
        claimed = self._claim(connection, now) if self.max_claimed > len(self._mine) else []
        connection.execute(
            f"DELETE FROM batches WHERE id IN (SELECT id FROM batches WHERE status NOT IN ({MARKS}) "
            "AND created_at <= ? LIMIT ?)",
            (*UNFINISHED, self.clock.earliest(AGES_S) - self._max_age_s, MAX_DELETED),
        )
        self.on_news(BatchNews(claimed, [name for (name,) in asked], [*lost]))

    def _claim(self, connection: sqlite3.Connection, now: float) -> list[StoredBatch]:
        rows = connection.execute(
            f"SELECT {COLUMNS} FROM batches WHERE status IN ({MARKS}) AND lease_until NOT BETWEEN ? AND ? "
            "ORDER BY created_at LIMIT ?",
            (*UNFINISHED, *lease_bounds(self.clock), self.max_claimed - len(self._mine)),
        )
        claimed = [_batch(row) for row in rows.fetchall()]
        for batch in claimed:
            connection.execute(
                "UPDATE batches SET router = ?, lease_until = ? WHERE id = ?", (self._router, now + LEASE_S, batch.id)
            )
            self._mine.add(batch.id)
        return claimed

    def _find(self, connection: sqlite3.Connection, batch_id: str, owner: str) -> StoredBatch | None:
        statement = f"SELECT {COLUMNS} FROM batches WHERE id = ? AND owner = ?"
        row = connection.execute(statement, (batch_id, owner)).fetchone()
        return None if row is None else _batch(row)

    def _own(self, connection: sqlite3.Connection, batch_id: str) -> StoredBatch | None:
        """A batch that this router has the lease of, run out or not, as long as no other took it."""
        statement = f"SELECT {COLUMNS} FROM batches WHERE id = ? AND router = ?"
        row = connection.execute(statement, (batch_id, self._router)).fetchone()
        return None if row is None else _batch(row)

    def _move(self, connection: sqlite3.Connection, batch: StoredBatch, status: str) -> StoredBatch:
        """Store a new status, with its time, and the batch's details."""
        times: Mapping[str, float] = batch.times
        if status != batch.status:
            times = {**times, status: self.clock.now()}
        moved = replace(batch, status=status, times=times)
        connection.execute(
            "UPDATE batches SET status = ?, details = ? WHERE id = ?", (moved.status, moved.details, moved.id)
        )
        return moved

    def _publish(self, connection: sqlite3.Connection, batch: StoredBatch, file: str, name: str) -> bool:
        """Give clients a file of results, or delete it if it is empty."""
        if connection.execute("SELECT 1 FROM pieces WHERE file = ? LIMIT 1", (file,)).fetchone() is None:
            connection.execute("DELETE FROM files WHERE id = ?", (file,))
            return False
        now = self.clock.now()
        connection.execute(
            "UPDATE files SET state = ?, filename = ?, created_at = ?, expires_at = ? WHERE id = ? AND state = ?",
            (READY, name, now, now + batch.result_s, file, WRITING),
        )
        return True

    def _make_room(self, connection: sqlite3.Connection) -> None:
        """Delete the oldest ended batches of the key that has most, until their number is within its bound."""
        (number,) = connection.execute("SELECT count(*) FROM batches").fetchone()
        for _ in range(max(0, number - self._max_entries)):
            (owner,) = connection.execute(
                "SELECT owner FROM batches GROUP BY owner ORDER BY count(*) DESC LIMIT 1"
            ).fetchone()
            connection.execute(
                "DELETE FROM batches WHERE id = (SELECT id FROM batches WHERE owner = ? "
                f"AND status NOT IN ({MARKS}) ORDER BY created_at LIMIT 1)",
                (owner, *UNFINISHED),
            )


def _batch(row: Sequence[Any]) -> StoredBatch:
    details = orjson.loads(row[10])
    return StoredBatch(
        id=row[0],
        owner=row[1],
        status=row[2],
        endpoint=row[3],
        input_file=row[4],
        output_file=row[5],
        error_file=row[6],
        created_at=row[7],
        expires_at=row[8],
        result_s=row[9],
        metadata=details["metadata"],
        model=details["model"],
        times=details["times"],
        problems=tuple(BatchProblem(**problem) for problem in details["problems"]),
        num_total=row[11],
        num_completed=row[12],
        num_failed=row[13],
        has_output=bool(row[14]),
        has_errors=bool(row[15]),
        usage=BatchUsage(*row[16:20]),
    )
