"""A SQLite database with a single worker thread.

    submit ──> queue, limited in entries and bytes ──> thread: one transaction each, in FIFO order ──> file

A read sees every write that was submitted before it, and no request waits for a write. If the disk is full at startup,
the thread opens the file once space is free. Until then all operations fail, and the router runs without the store.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from common.machine import LEASES_S, NO_ROOM, WallClock, is_full, write_failure
from common.observe import REMIND_S
from router.stored.errors import StoreFailed
from router.stored.records import IN_MEMORY

log = logging.getLogger(__name__)

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]

MAX_WAITING, MAX_WAITING_BYTES = 10_000, 64 * 1024 * 1024
"""Limits of the queue. Without them a slow disk would fill memory."""
BUSY_S = 5.0
"""How long a statement waits for another process that writes to the same file, in seconds."""
RETRY_S = 0.01
"""Interval between attempts to set up a file that another process is also setting up, in seconds."""
WAIT_S = 10.0
"""How long a request waits for the queue and its result, in seconds."""
CLOSE_S = 5.0
"""How long `close` waits for queued work, in seconds."""
MAX_WAL_BYTES = 64 * 1024 * 1024
"""Maximum size of SQLite's write-ahead log after a checkpoint."""
LEASE_S = 15.0
"""Lifetime of the lease of a background response or batch without renewal, in seconds: how long a client waits until
another router takes over."""
CHORE_S = 3.0
"""Interval of maintenance, in seconds. A lease survives four failed runs."""
MAX_DELETED = 1000
"""Maximum number of rows that one maintenance run deletes, because requests wait for the transaction."""
VACUUM_PAGES = 1000
"""Maximum number of 4 KiB pages that one maintenance run returns to the file system. Takes milliseconds."""


def lease_bounds(clock: WallClock) -> tuple[float, float]:
    """Return the earliest and latest end of a valid lease. Later ends come from a clock that was ahead."""
    return clock.earliest(LEASES_S), clock.latest(LEASES_S) + LEASE_S


@dataclass(frozen=True, slots=True)
class Schema:
    """Tables of a SQLite file. `name` appears in logs, and `application_id` identifies the file format.

    `checked` are the tables that are checked for damage at startup; empty: the whole file.
    """

    name: str
    application_id: int
    version: int
    tables: str
    checked: tuple[str, ...] = ()


def counted_by_owner(table: str, counts: str, number: str) -> str:
    """Return SQL for a table `counts` with the number and bytes of each owner's rows, maintained by triggers."""
    return f"""CREATE TABLE IF NOT EXISTS {counts} (
    owner TEXT PRIMARY KEY, {number} INTEGER NOT NULL, num_bytes INTEGER NOT NULL
);
CREATE TRIGGER IF NOT EXISTS {table}_added AFTER INSERT ON {table} BEGIN
    INSERT INTO {counts} VALUES (new.owner, 1, new.num_bytes) ON CONFLICT (owner)
    DO UPDATE SET {number} = {number} + 1, num_bytes = num_bytes + new.num_bytes;
END;
CREATE TRIGGER IF NOT EXISTS {table}_resized AFTER UPDATE OF num_bytes ON {table} BEGIN
    UPDATE {counts} SET num_bytes = num_bytes + new.num_bytes - old.num_bytes WHERE owner = new.owner;
END;
CREATE TRIGGER IF NOT EXISTS {table}_deleted AFTER DELETE ON {table} BEGIN
    UPDATE {counts} SET {number} = {number} - 1, num_bytes = num_bytes - old.num_bytes WHERE owner = old.owner;
    DELETE FROM {counts} WHERE owner = old.owner AND {number} <= 0;
END;
"""


@dataclass(slots=True)
class _Job:
    work: Work[Any]
    result: Future[Any]
    num_bytes: int


class Database:
    """Opens and checks the file `path`, and creates its tables. `chore` runs on the thread every `chore_s` seconds.

    `on_failure` is called on any thread, with the reason of each failure. Raises sqlite3.Error or OSError for a file
    that is damaged, has another format, or cannot be written for a reason other than a full disk.
    """

    def __init__(
        self,
        path: str,
        schema: Schema,
        on_failure: Callable[[str], None],
        chore: Work[None],
        chore_s: float,
        *,
        busy_s: float = BUSY_S,
    ) -> None:
        self.path, self._on_failure, self._chore, self._chore_s = path, on_failure, chore, chore_s
        self._schema, self._name, self._busy_s = schema, schema.name, busy_s
        self._connection: sqlite3.Connection | None = None
        self._logged_at = float("-inf")
        try:
            self._connection = _opened(path, schema, busy_s)
        except (sqlite3.OperationalError, OSError) as error:
            if not _is_disk_full(path, error):
                raise
            self._open_failure(error)
        self._queue: queue.Queue[_Job | None] = queue.Queue()
        self._lock = threading.Lock()  # protects the two counts
        self._num_waiting = self._num_bytes = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="store", daemon=True)
        self._thread.start()

    def submit(self, work: Work[T], num_bytes: int = 0) -> Future[T]:
        """Queue `work`, which retains `num_bytes` of memory until it runs in a transaction. Return its future result.

        Raises StoreFailed if the queue is full or the database is closed. The future raises StoreFailed for errors.
        """
        with self._lock:
            if self._closed:
                raise self._failure("closed", "the store is closed")
            if self._num_waiting >= MAX_WAITING or self._num_bytes + num_bytes > MAX_WAITING_BYTES:
                raise self._failure(
                    "behind", f"the queue of the store is full: {self._num_waiting:,} operations wait for the disk"
                )
            self._num_waiting += 1
            self._num_bytes += num_bytes
            job = _Job(work, Future(), num_bytes)
            self._queue.put(job)
        return job.result

    async def run(self, work: Work[T], num_bytes: int = 0) -> T:
        """Run `work` and return its result. Raises StoreFailed, also after `WAIT_S`."""
        try:
            async with asyncio.timeout(WAIT_S):
                return await asyncio.wrap_future(self.submit(work, num_bytes))
        except TimeoutError:
            raise self._failure("slow", f"the store did not respond within {WAIT_S:g} s") from None

    def close(self) -> None:
        """Complete queued work, for up to `CLOSE_S`, and close the file. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._queue.put(None)
        self._thread.join(CLOSE_S)

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        next_chore = time.monotonic() + self._chore_s
        while True:
            try:
                job = self._queue.get(timeout=max(0.0, next_chore - time.monotonic()))
            except queue.Empty:
                next_chore = self._do_chore()
                continue
            if job is None:
                if self._connection is not None:
                    self._connection.close()
                return
            with self._lock:
                self._num_waiting -= 1
                self._num_bytes -= job.num_bytes
            if not job.result.set_running_or_notify_cancel():
                continue
            try:
                result = self._transact(job.work)
            except Exception as error:  # raised again in the request that waits for the future
                _settle(job.result, error=error)
            else:
                _settle(job.result, result)
            if time.monotonic() >= next_chore:  # a queue that is never empty must not delay it forever
                next_chore = self._do_chore()

    def _do_chore(self) -> float:
        """Run the chore, and return when it is due again (monotonic seconds). Errors do not end the thread."""
        try:
            if self._connection is None:
                self._reopen()
            self._transact(self._chore)
        except StoreFailed:  # already counted and logged
            pass
        except Exception:
            log.exception("store of %s: maintenance failed", self._name, extra={"path": self.path})
        return time.monotonic() + self._chore_s

    def _reopen(self) -> None:
        try:
            self._connection = _opened(self.path, self._schema, self._busy_s)
        except (sqlite3.Error, OSError) as error:
            raise self._open_failure(error) from error
        log.info("store of %s: opened; the disk is no longer full", self._name, extra={"path": self.path})

    def _open_failure(self, error: Exception) -> StoreFailed:
        reason = _reason(error) if isinstance(error, sqlite3.Error) else "error"
        return self._failure("full" if _is_disk_full(self.path, error) else reason, f"cannot open the store: {error}")

    def _transact(self, work: Work[T]) -> T:
        connection = self._connection
        if connection is None:
            raise self._failure("full", "the store is not open, because the disk was full at startup")
        try:
            connection.execute("BEGIN IMMEDIATE")
            try:
                result = work(connection)
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise self._failure(_reason(error), f"SQLite error: {error}") from error
        return result

    def _failure(self, reason: str, message: str) -> StoreFailed:
        self._on_failure(reason)
        now = time.monotonic()
        if now - self._logged_at >= REMIND_S:
            self._logged_at = now
            shown = message
            if reason == "full" and self.path != IN_MEMORY:  # clients do not learn of paths
                full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                shown = f"{message}; {write_failure(self.path, full)}"
            log.error("store of %s: %s", self._name, shown, extra={"path": self.path, "reason": reason})
        return StoreFailed(reason, message)


def _opened(path: str, schema: Schema, busy_s: float) -> sqlite3.Connection:
    if path != IN_MEMORY:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))  # conversations are private
    connection = sqlite3.connect(path, timeout=busy_s, isolation_level=None, check_same_thread=False)
    try:
        _check_format(connection, schema)
        for statement in (
            "PRAGMA auto_vacuum = INCREMENTAL",  # only takes effect before the first table
            "PRAGMA secure_delete = ON",  # deleted data must not remain in the file
            "PRAGMA synchronous = NORMAL",
            "PRAGMA foreign_keys = OFF",
            f"PRAGMA journal_size_limit = {MAX_WAL_BYTES}",
        ):
            connection.execute(statement)
        mode = _write_ahead(connection, busy_s)
        if path != IN_MEMORY and mode != "wal":
            raise sqlite3.OperationalError(f"the file system does not allow WAL mode (journal mode {mode})")
        _create_tables(connection, schema)
    except BaseException:
        connection.close()
        raise
    return connection


def _check_format(connection: sqlite3.Connection, schema: Schema) -> None:
    """Raise sqlite3.DatabaseError if the file has another format or a newer version, or is damaged."""
    connection.execute("BEGIN")  # a consistent view: another process may be creating the tables
    try:
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        (num_tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    finally:
        if connection.in_transaction:  # SQLite has already ended it if the disk is full
            connection.execute("ROLLBACK")
    if num_tables and application != schema.application_id:
        raise sqlite3.DatabaseError("the file is a database of another program")
    if version > schema.version:
        known = f"this program supports versions up to {schema.version}"
        raise sqlite3.DatabaseError(f"the file has version {version}; {known}")
    for what in schema.checked if num_tables and schema.checked else ("1",):
        (found,) = connection.execute(f"PRAGMA quick_check({what})").fetchone()
        if found != "ok":
            raise sqlite3.DatabaseError(f"the file is damaged: {' '.join(str(found).split())}")


def _create_tables(connection: sqlite3.Connection, schema: Schema) -> None:
    """Create missing tables. Raises sqlite3.OperationalError if the file cannot be written."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        for statement in _statements(schema.tables):
            connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {schema.application_id}")
        connection.execute(f"PRAGMA user_version = {schema.version}")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _statements(script: str) -> list[str]:
    """Split a script into statements. A trigger is a single statement."""
    statements, begun = [], ""
    for line in script.splitlines(keepends=True):
        begun += line
        if sqlite3.complete_statement(begun):
            statements.append(begun)
            begun = ""
    return statements


def _write_ahead(connection: sqlite3.Connection, busy_s: float) -> str:
    """Request WAL and return the journal mode. Retries, because SQLite does not wait while another process opens."""
    until = time.monotonic() + busy_s
    while True:
        try:
            (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
            return str(mode)
        except sqlite3.OperationalError as error:
            if _reason(error) != "busy" or time.monotonic() > until:
                raise
            time.sleep(RETRY_S)


def _is_disk_full(path: str, error: Exception) -> bool:
    """Whether a file cannot be opened because its disk is full. SQLite reports this as several different errors."""
    if isinstance(error, OSError):
        return error.errno in NO_ROOM
    if path == IN_MEMORY or not isinstance(error, sqlite3.OperationalError):
        return False
    return _reason(error) == "full" or is_full(Path(path).parent)


def _reason(error: sqlite3.Error) -> str:
    """Return the metric label for an error."""
    names = {"SQLITE_FULL": "full", "SQLITE_BUSY": "busy", "SQLITE_CORRUPT": "damaged", "SQLITE_NOTADB": "damaged"}
    return names.get("_".join(getattr(error, "sqlite_errorname", "").split("_")[:2]), "error")


def _settle(result: Future[T], value: T | None = None, error: Exception | None = None) -> None:
    with suppress(InvalidStateError):
        if error is None:
            result.set_result(value)  # type: ignore[arg-type]  # None only where T is None
        else:
            result.set_exception(error)
