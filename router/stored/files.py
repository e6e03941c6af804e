"""Store of files, limited in bytes, number and age. Only the API key that created a file can access it.

    begin ─> append, append ... ─> complete ─> find, read ─> delete or expiry ─> pieces are deleted gradually

Each piece is a row. An upload is therefore never in memory as a whole, and a batch's result is stored in the same
transaction that counts it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence

from common.machine import AGES_S, WALL_CLOCK, WallClock
from router.stored.batches import BatchStore
from router.stored.database import CHORE_S, VACUUM_PAGES, Database, Schema, counted_by_owner
from router.stored.errors import FileInUse, StoreFull
from router.stored.records import DELETED, READY, UNFINISHED, WRITING, StoredFile, StoreSize

FILE_TABLES = f"""
CREATE TABLE IF NOT EXISTS files (
    id TEXT PRIMARY KEY,
    owner TEXT NOT NULL,
    purpose TEXT NOT NULL,
    filename TEXT NOT NULL,
    created_at REAL NOT NULL,
    expires_at REAL NOT NULL,
    num_bytes INTEGER NOT NULL DEFAULT 0,
    state TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS files_by_owner ON files (owner, created_at, id);
CREATE INDEX IF NOT EXISTS files_by_expiry ON files (state, expires_at);
CREATE TABLE IF NOT EXISTS pieces (
    file TEXT NOT NULL,
    number INTEGER NOT NULL,
    content BLOB NOT NULL,
    PRIMARY KEY (file, number)
);
CREATE TABLE IF NOT EXISTS batches (
    id TEXT PRIMARY KEY,
    owner TEXT NOT NULL,
    status TEXT NOT NULL,
    endpoint TEXT NOT NULL,
    input_file TEXT NOT NULL,
    output_file TEXT NOT NULL,
    error_file TEXT NOT NULL,
    created_at REAL NOT NULL,
    expires_at REAL NOT NULL,
    result_s REAL NOT NULL,
    details BLOB NOT NULL,
    num_total INTEGER NOT NULL DEFAULT 0,
    num_completed INTEGER NOT NULL DEFAULT 0,
    num_failed INTEGER NOT NULL DEFAULT 0,
    has_output INTEGER NOT NULL DEFAULT 0,
    has_errors INTEGER NOT NULL DEFAULT 0,
    input_tokens INTEGER NOT NULL DEFAULT 0,
    cached_tokens INTEGER NOT NULL DEFAULT 0,
    output_tokens INTEGER NOT NULL DEFAULT 0,
    reasoning_tokens INTEGER NOT NULL DEFAULT 0,
    router TEXT NOT NULL,
    lease_until REAL NOT NULL
);
CREATE INDEX IF NOT EXISTS batches_by_owner ON batches (owner, created_at, id);
CREATE INDEX IF NOT EXISTS batches_by_status ON batches (status, created_at);
{counted_by_owner("files", "file_owners", "num_files")}"""
FILES = Schema(
    "files",
    application_id=0x64707466,
    version=1,
    tables=FILE_TABLES,
    checked=("files", "batches", "file_owners"),  # checking all contents at each start would take minutes
)
PURGED_ROWS, PURGED_BYTES = 2000, 32 * 1024 * 1024
"""Limits on what one transaction deletes, because other operations wait for it."""
ABANDONED_S = 7200.0
"""Age at which an incomplete upload is deleted, in seconds: its router has ended. Twice the maximum upload time."""
RESULTS_SHARE = 4
"""Divisor of the store's size for the extra space of batch results, so that uploads cannot displace them."""
COLUMNS = "id, owner, purpose, filename, created_at, expires_at, num_bytes"


class FileStore:
    """SQLite store of files at `path` (":memory:": not persistent). Raises sqlite3.Error or OSError.

    `on_failure` is called on any thread, with the reason of each failure. `batches` are the batches on these files.
    """

    def __init__(
        self,
        path: str,
        on_failure: Callable[[str], None] = lambda reason: None,
        *,
        max_bytes: int,
        max_entries: int,
        max_age_s: float,
        clock: WallClock = WALL_CLOCK,
        chore_s: float = CHORE_S,
    ) -> None:
        self.path, self.max_age_s = path, max_age_s
        self._max_bytes, self._max_entries, self._clock = max_bytes, max_entries, clock
        self.size = StoreSize()
        self._database = Database(path, FILES, on_failure, self._maintain, chore_s)
        self.batches = BatchStore(
            self._database, self.check_room, max_entries=max_entries, max_age_s=max_age_s, clock=clock
        )
        self._has_begun = False
        self._database.submit(self._begin)

    def close(self) -> None:
        """Complete queued writes, and close the file."""
        self._database.close()

    # ------------------------------------------------------------ writing

    async def begin(self, file: StoredFile, num_bytes: int = 0) -> None:
        """Begin a file of about `num_bytes`. Clients see it after `complete`. Raises StoreFull, StoreFailed."""

        def work(connection: sqlite3.Connection) -> None:
            self.check_room(connection, file.owner, num_bytes, num_files=1)
            connection.execute(
                f"INSERT INTO files ({COLUMNS}, state) VALUES (?, ?, ?, ?, ?, ?, 0, ?)",
                (
                    *(file.id, file.owner, file.purpose, file.filename, file.created_at),
                    *(self._clock.now() + ABANDONED_S, WRITING),
                ),
            )
            self._measure(connection)

        await self._database.run(work)

    async def append(self, file: StoredFile, number: int, content: bytes) -> None:
        """Append piece `number` to a file that is being written. Raises StoreFull, StoreFailed."""

        def work(connection: sqlite3.Connection) -> None:
            self.check_room(connection, file.owner, len(content))
            connection.execute("INSERT INTO pieces VALUES (?, ?, ?)", (file.id, number, content))
            connection.execute("UPDATE files SET num_bytes = num_bytes + ? WHERE id = ?", (len(content), file.id))
            self._measure(connection)

        await self._database.run(work, len(content))

    async def complete(self, file: StoredFile) -> StoredFile:
        """Make a file available, with the name and expiry of `file`. Return it as stored. Raises StoreFailed."""

        def work(connection: sqlite3.Connection) -> StoredFile:
            connection.execute(
                "UPDATE files SET state = ?, filename = ?, expires_at = ? WHERE id = ? AND state = ?",
                (READY, file.filename, file.expires_at, file.id, WRITING),
            )
            row = connection.execute(f"SELECT {COLUMNS} FROM files WHERE id = ?", (file.id,)).fetchone()
            return StoredFile(*row)

        return await self._database.run(work)

    async def abandon(self, file: StoredFile) -> None:
        """Delete an incomplete file. Raises StoreFailed."""

        def work(connection: sqlite3.Connection) -> None:
            connection.execute("UPDATE files SET state = ? WHERE id = ? AND state = ?", (DELETED, file.id, WRITING))
            self._purge(connection)

        await self._database.run(work)

    async def delete(self, file_id: str, owner: str) -> bool:
        """Delete a file. Return whether it existed. Raises FileInUse, StoreFailed."""

        def work(connection: sqlite3.Connection) -> bool:
            if self._find(connection, file_id, owner) is None:
                return False
            if (batch := self._reading_batch(connection, file_id)) is not None:
                raise FileInUse(file_id, batch)
            connection.execute("UPDATE files SET state = ? WHERE id = ?", (DELETED, file_id))
            self._purge(connection)
            return True

        return await self._database.run(work)

    # ------------------------------------------------------------ reading

    async def find(self, file_id: str, owner: str) -> StoredFile | None:
        """Return a complete file, or None. Raises StoreFailed."""
        return await self._database.run(lambda connection: self._find(connection, file_id, owner))

    async def page(
        self, owner: str, *, purpose: str | None, descending: bool, limit: int, after: str | None
    ) -> list[StoredFile] | None:
        """Return up to `limit` files by age, starting after the file `after`. None if that does not exist.

        Raises StoreFailed.
        """

        def work(connection: sqlite3.Connection) -> list[StoredFile] | None:
            place: tuple[object, ...] = ()
            if after is not None:
                if (last := self._find(connection, after, owner)) is None:
                    return None
                place = (last.created_at, last.id)
            order, beyond = ("DESC", "<") if descending else ("ASC", ">")
            rows = connection.execute(
                f"SELECT {COLUMNS} FROM files WHERE owner = ? AND state = ? AND expires_at > ?"
                + (" AND purpose = ?" if purpose is not None else "")
                + (f" AND (created_at, id) {beyond} (?, ?)" if place else "")
                + f" ORDER BY created_at {order}, id {order} LIMIT ?",
                (owner, READY, self._clock.earliest(AGES_S), *([] if purpose is None else [purpose]), *place, limit),
            )
            return [StoredFile(*row) for row in rows]

        return await self._database.run(work)

    async def read(self, file_id: str, after: int, num_bytes: int) -> Sequence[tuple[int, bytes]]:
        """Return at least one piece after `after`, and more until they total `num_bytes`. Raises StoreFailed."""

        def work(connection: sqlite3.Connection) -> list[tuple[int, bytes]]:
            found, size = [], 0
            rows = connection.execute(
                "SELECT number, content FROM pieces WHERE file = ? AND number > ? ORDER BY number", (file_id, after)
            )
            for number, content in rows:
                found.append((number, content))
                size += len(content)
                if size >= num_bytes:
                    break
            return found

        return await self._database.run(work)

    # ------------------------------------------------------------ inside a transaction

    def check_room(
        self, connection: sqlite3.Connection, owner: str, num_bytes: int, *, num_files: int = 0, results: bool = False
    ) -> None:
        """Raise StoreFull if adding files or bytes for this key would exceed a limit."""
        held = connection.execute("SELECT total(num_files), total(num_bytes) FROM file_owners").fetchone()
        held_files, total = (int(number) for number in held)
        row = connection.execute("SELECT num_bytes FROM file_owners WHERE owner = ?", (owner,)).fetchone()
        own = 0 if row is None else int(row[0])
        most = self._max_bytes + (self._max_bytes // RESULTS_SHARE if results else 0)
        share = most if not owner else most // 2
        if total + num_bytes > most or own + num_bytes > share:
            raise StoreFull(
                f"the store is full: all files have {total:,} of {most:,} bytes, those of this key {own:,} of "
                f"{share:,} bytes, and {num_bytes:,} more do not fit. Delete files"
            )
        if num_files and held_files + num_files > self._max_entries:
            raise StoreFull(f"the store is full: it has {held_files:,} of {self._max_entries:,} files. Delete files")

    def _find(self, connection: sqlite3.Connection, file_id: str, owner: str) -> StoredFile | None:
        statement = f"SELECT {COLUMNS} FROM files WHERE id = ? AND owner = ? AND state = ? AND expires_at > ?"
        row = connection.execute(statement, (file_id, owner, READY, self._clock.earliest(AGES_S))).fetchone()
        return None if row is None else StoredFile(*row)

    def _reading_batch(self, connection: sqlite3.Connection, file_id: str) -> str | None:
        marks = ", ".join("?" * len(UNFINISHED))
        statement = f"SELECT id FROM batches WHERE status IN ({marks}) AND input_file = ?"
        row = connection.execute(statement, (*UNFINISHED, file_id)).fetchone()
        return None if row is None else str(row[0])

    def _measure(self, connection: sqlite3.Connection) -> None:
        row = connection.execute("SELECT total(num_files), total(num_bytes) FROM file_owners").fetchone()
        self.size = StoreSize(int(row[0]), int(row[1]))

    def _purge(self, connection: sqlite3.Connection) -> None:
        """Delete pieces of deleted files, up to a limit. The remaining pieces still count as stored."""
        num_rows = num_bytes = 0
        for (file_id,) in connection.execute("SELECT id FROM files WHERE state = ?", (DELETED,)).fetchall():
            doomed, freed = [], 0
            rows = connection.execute("SELECT rowid, length(content) FROM pieces WHERE file = ?", (file_id,))
            while num_rows < PURGED_ROWS and num_bytes < PURGED_BYTES and (row := rows.fetchone()) is not None:
                doomed.append((row[0],))
                freed, num_rows, num_bytes = freed + row[1], num_rows + 1, num_bytes + row[1]
            rows.close()
            connection.executemany("DELETE FROM pieces WHERE rowid = ?", doomed)
            if num_rows < PURGED_ROWS and num_bytes < PURGED_BYTES:
                connection.execute("DELETE FROM files WHERE id = ?", (file_id,))
            else:
                connection.execute("UPDATE files SET num_bytes = num_bytes - ? WHERE id = ?", (freed, file_id))
                break
        self._measure(connection)

    def _begin(self, connection: sqlite3.Connection) -> None:
        """Measure the store, and advance the clock to its last time stamp in case it was set back."""
        if not self._has_begun:
            self._measure(connection)
            (latest,) = connection.execute("SELECT max(created_at) FROM files").fetchone()
            if latest is not None:
                self._clock.observe(latest)
            self._has_begun = True

    def _maintain(self, connection: sqlite3.Connection) -> None:
        """Maintain batches, delete expired files, and return space to the file system."""
        self._begin(connection)
        self.batches.maintain(connection)
        marks = ", ".join("?" * len(UNFINISHED))
        used = " UNION ".join(
            f"SELECT {column} FROM batches WHERE status IN ({marks})"
            for column in ("input_file", "output_file", "error_file")
        )
        connection.execute(
            f"UPDATE files SET state = ? WHERE state IN (?, ?) AND expires_at <= ? AND id NOT IN ({used})",
            (DELETED, READY, WRITING, self._clock.earliest(AGES_S), *(3 * UNFINISHED)),
        )
        self._purge(connection)
        connection.execute(f"PRAGMA incremental_vacuum({VACUUM_PAGES})").fetchall()
