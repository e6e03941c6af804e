"""Store of batches: their definition, their progress, and the router that processes each.

An unfinished batch has a lease, which its router renews. If the lease has expired, the router has ended, and the next
router that runs maintenance claims the batch. A router writes to a batch only while it owns it, so if two routers both
consider a batch theirs, only one makes progress.
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
    BatchChanges,
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
    """Signature of `FileStore.check_room`."""

    def __call__(
        self, connection: sqlite3.Connection, owner: str, num_bytes: int, *, num_files: int = 0, results: bool = False
    ) -> None: ...


class BatchStore:
    """Batches in the database of files. `on_news` is called with `BatchChanges` on the store's thread.

    `max_claimed` is the maximum number of batches that this router processes, initially 0.
    """

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
        self._own_ids: set[str] = set()  # copied by the store's thread before iteration
        self.max_claimed = 0
        self.on_news: Callable[[BatchChanges], None] = lambda news: None

    # ------------------------------------------------------------ operations of clients

    async def create(self, batch: StoredBatch, allowed: Callable[[int, int], None]) -> None:
        """Store a new batch, owned by this router. Raises StoreFull, StoreFailed, and errors of `allowed`.

        `allowed` is called with the number of unfinished batches, and with that of the same key.
        """

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
            self._evict(connection)

        await self._database.run(work)
        self._own_ids.add(batch.id)  # not in `work`: a creation that was given up may still commit

    async def find(self, batch_id: str, owner: str) -> StoredBatch | None:
        """Return the current state of a batch. Raises StoreFailed."""
        return await self._database.run(lambda connection: self._find(connection, batch_id, owner))

    async def page(self, owner: str, *, limit: int, after: str | None) -> list[StoredBatch] | None:
        """Return up to `limit` batches, latest first, starting after the batch `after`. None if that does not exist.

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
        """Request cancellation of a batch if it is unfinished, and return it. Raises StoreFailed."""

        def work(connection: sqlite3.Connection) -> StoredBatch | None:
            batch = self._find(connection, batch_id, owner)
            if batch is not None and batch.status in (VALIDATING, IN_PROGRESS):
                self._set_status(connection, batch, CANCELLING)
            return self._find(connection, batch_id, owner)

        return await self._database.run(work)

    # ------------------------------------------------------------ operations of the router that owns a batch

    async def begin(self, batch: StoredBatch, num_total: int, model: str | None) -> StoredBatch | None:
        """Start a validated batch. Return its state, or None if this router lost it. Raises StoreFailed."""

        def work(connection: sqlite3.Connection) -> StoredBatch | None:
            if (found := self._own(connection, batch.id)) is None:
                return None
            connection.execute("UPDATE batches SET num_total = ? WHERE id = ?", (num_total, batch.id))
            status = IN_PROGRESS if found.status == VALIDATING else found.status
            self._set_status(connection, replace(found, model=model), status)
            return self._own(connection, batch.id)

        return await self._database.run(work)

    async def finished(self, batch: StoredBatch) -> set[int]:
        """Return the numbers of the input lines that have a result. Raises StoreFailed."""
        statement = "SELECT number FROM pieces WHERE file IN (?, ?)"
        files = (batch.output_file, batch.error_file)
        return await self._database.run(
            lambda connection: {number for (number,) in connection.execute(statement, files)}
        )

    async def add(self, batch: StoredBatch, results: Sequence[LineResult]) -> bool:
        """Store and count results. Return False if this router lost the batch.

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
                if not added.rowcount:  # stored by an earlier attempt that was assumed to have failed
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
        """Mark the last line as done. Return False if this router lost the batch. Raises StoreFailed."""

        def work(connection: sqlite3.Connection) -> bool:
            found = self._own(connection, batch.id)
            if found is not None and found.status == IN_PROGRESS:
                self._set_status(connection, found, FINALIZING)
            return found is not None

        return await self._database.run(work)

    async def end(self, batch: StoredBatch, status: str, problems: Sequence[BatchProblem] = ()) -> StoredBatch | None:
        """Set the final status and publish the results. Return the batch, or None if this router lost it.

        Raises StoreFailed.
        """

        def work(connection: sqlite3.Connection) -> StoredBatch | None:
            if (found := self._own(connection, batch.id)) is None:
                return None
            last = CANCELLED if status == COMPLETED and found.status == CANCELLING else status
            if last in (COMPLETED, EXPIRED) and FINALIZING not in found.times:
                found = self._set_status(connection, found, FINALIZING)
            has_output = self._publish(connection, found, found.output_file, f"{batch.id}_output.jsonl")
            has_errors = self._publish(connection, found, found.error_file, f"{batch.id}_error.jsonl")
            self._set_status(connection, replace(found, problems=problems), last)
            connection.execute(
                "UPDATE batches SET has_output = ?, has_errors = ?, router = '', lease_until = 0 WHERE id = ?",
                (has_output, has_errors, batch.id),
            )
            self._own_ids.discard(batch.id)
            return self._find(connection, batch.id, batch.owner)

        return await self._database.run(work)

    def stop_renewing(self, batch: StoredBatch) -> None:
        """Stop renewing the lease of a batch. Does not wait."""
        self._own_ids.discard(batch.id)

    async def release(self) -> None:
        """Release all batches, so that other routers claim them. Raises StoreFailed."""
        self.max_claimed = 0

        def work(connection: sqlite3.Connection) -> None:
            statement = "UPDATE batches SET router = '', lease_until = 0 WHERE router = ?"
            connection.execute(statement, (self._router,))
            self._own_ids.clear()

        await self._database.run(work)

    async def look(self) -> None:
        """Run maintenance now, to claim batches. Raises StoreFailed."""
        await self._database.run(self.maintain)

    # ------------------------------------------------------------ inside a transaction

    def maintain(self, connection: sqlite3.Connection) -> None:
        """Renew leases, claim batches whose lease has expired, and delete expired batches."""
        now = self.clock.now()
        lost = set()
        for name in list(self._own_ids):
            renewed = connection.execute(
                "UPDATE batches SET lease_until = ? WHERE id = ? AND router = ?", (now + LEASE_S, name, self._router)
            )
            if not renewed.rowcount:
                lost.add(name)
        self._own_ids -= lost
        asked = connection.execute(
            "SELECT id FROM batches WHERE status = ? AND router = ?", (CANCELLING, self._router)
        ).fetchall()
        room = self.max_claimed - len(self._own_ids)  # read once: both change on the event loop
        claimed = self._claim(connection, now, room) if room > 0 else []
        connection.execute(
            f"DELETE FROM batches WHERE id IN (SELECT id FROM batches WHERE status NOT IN ({MARKS}) "
            "AND created_at <= ? LIMIT ?)",
            (*UNFINISHED, self.clock.earliest(AGES_S) - self._max_age_s, MAX_DELETED),
        )
        self.on_news(BatchChanges(claimed, [name for (name,) in asked], [*lost]))

    def _claim(self, connection: sqlite3.Connection, now: float, most: int) -> list[StoredBatch]:
        rows = connection.execute(
            f"SELECT {COLUMNS} FROM batches WHERE status IN ({MARKS}) AND lease_until NOT BETWEEN ? AND ? "
            "ORDER BY created_at LIMIT ?",
            (*UNFINISHED, *lease_bounds(self.clock), most),
        )
        claimed = [_batch(row) for row in rows.fetchall()]
        for batch in claimed:
            connection.execute(
                "UPDATE batches SET router = ?, lease_until = ? WHERE id = ?", (self._router, now + LEASE_S, batch.id)
            )
            self._own_ids.add(batch.id)
        return claimed

    def _find(self, connection: sqlite3.Connection, batch_id: str, owner: str) -> StoredBatch | None:
        statement = f"SELECT {COLUMNS} FROM batches WHERE id = ? AND owner = ?"
        row = connection.execute(statement, (batch_id, owner)).fetchone()
        return None if row is None else _batch(row)

    def _own(self, connection: sqlite3.Connection, batch_id: str) -> StoredBatch | None:
        """Return a batch that this router owns, even if its lease has expired but no other router claimed it."""
        statement = f"SELECT {COLUMNS} FROM batches WHERE id = ? AND router = ?"
        row = connection.execute(statement, (batch_id, self._router)).fetchone()
        return None if row is None else _batch(row)

    def _set_status(self, connection: sqlite3.Connection, batch: StoredBatch, status: str) -> StoredBatch:
        """Store a new status with its time, and the batch's details."""
        times: Mapping[str, float] = batch.times
        if status != batch.status:
            times = {**times, status: self.clock.now()}
        moved = replace(batch, status=status, times=times)
        connection.execute(
            "UPDATE batches SET status = ?, details = ? WHERE id = ?", (moved.status, moved.details, moved.id)
        )
        return moved

    def _publish(self, connection: sqlite3.Connection, batch: StoredBatch, file: str, name: str) -> bool:
        """Make a result file available to clients, or delete it if it is empty."""
        if connection.execute("SELECT 1 FROM pieces WHERE file = ? LIMIT 1", (file,)).fetchone() is None:
            connection.execute("DELETE FROM files WHERE id = ?", (file,))
            return False
        now = self.clock.now()
        connection.execute(
            "UPDATE files SET state = ?, filename = ?, created_at = ?, expires_at = ? WHERE id = ? AND state = ?",
            (READY, name, now, now + batch.result_s, file, WRITING),
        )
        return True

    def _evict(self, connection: sqlite3.Connection) -> None:
        """Delete the oldest finished batches of the key with the most batches, until the limit is met."""
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
