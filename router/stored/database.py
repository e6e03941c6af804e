"""One SQLite database and the one thread that works on it.

    submit ──> queue, bounded in entries and bytes ──> thread: a transaction each, in the order of the queue ──> file

A read therefore sees every write submitted before it, and no request has to wait for a write. If the disk is full at
startup, the thread opens the file once space is free. Until then all work fails, and the router runs without the store.
"""

from __future__ import annotations

import asyncio
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

from common.machine import LEASES_S, NO_ROOM, WallClock, is_full
from common.observe import REMIND_S
from router.stored.errors import StoreFailed
from router.stored.records import IN_MEMORY

log = logging.getLogger(__name__)

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]

MAX_WAITING, MAX_WAITING_BYTES = 10_000, 64 * 1024 * 1024
"""Work that waits for the thread: beyond, a slow disk would fill memory."""
BUSY_S = 5.0
"""How long a statement waits for another process that writes to the same file."""
RETRY_S = 0.01
"""Between two tries to set up a file that another process is setting up as well."""
WAIT_S = 10.0
"""How long a request waits for its turn and its result."""
CLOSE_S = 5.0
"""For what was submitted to be written when the router ends."""
MAX_WAL_BYTES = 64 * 1024 * 1024
"""What SQLite's log may keep of the disk once it was written back."""
LEASE_S = 15.0
"""How long an answer in the background, or a batch, stays its router's own without a renewal: the wait of a client
before another router takes over."""
CHORE_S = 3.0
"""Between two looks at leases, cancellations and ages: a lease survives four that fail."""
MAX_DELETED = 1000
"""Rows that one look deletes for lack of room, or for their age: requests wait for the transaction."""
VACUUM_PAGES = 1000
"""Pages of 4 KiB that a look gives back to the file system at most: milliseconds."""


def lease_bounds(clock: WallClock) -> tuple[float, float]:
    """Return the earliest and latest end of a valid lease. Later ends come from a clock that was ahead."""
    return clock.earliest(LEASES_S), clock.latest(LEASES_S) + LEASE_S


@dataclass(frozen=True, slots=True)
class Schema:
    """The tables of a SQLite file with the things of this `name`, which `application_id` marks as ours.

    `checked` names the tables whose pages are read at each start, to find damage; without names all are.
    """

    name: str
    application_id: int
    version: int
    tables: str
    checked: tuple[str, ...] = ()


def counted_by_owner(table: str, counts: str, number: str) -> str:
    """The table `counts`, in which triggers keep the `number` of each owner's rows of `table`, and their bytes."""
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
    """Opens `path`, checks it and makes its tables. `chore` runs on the thread every `chore_s` seconds.

    `on_failure` gets the reason of each failure, on any thread. Raises sqlite3.Error or OSError for a file that is
    damaged, is not a store, or cannot be written for another reason than a full disk.
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
        self._complained_at = float("-inf")
        try:
            self._connection = _opened(path, schema, busy_s)
        except (sqlite3.OperationalError, OSError) as error:
            if not _has_no_room(path, error):
                raise
            self._closed_by(error)
        self._queue: queue.Queue[_Job | None] = queue.Queue()
        self._lock = threading.Lock()  # of the two counts
        self._num_waiting = self._num_bytes = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="store", daemon=True)
        self._thread.start()

    def submit(self, work: Work[T], num_bytes: int = 0) -> Future[T]:
        """Have the thread do `work` in a transaction; it holds `num_bytes` until then. The future gets the result.

        Raises StoreFailed at once when the queue is full or the database closed; so does the future for an error.
        """
        with self._lock:
            if self._closed:
                raise self._failed("closed", "the store is closed")
            if self._num_waiting >= MAX_WAITING or self._num_bytes + num_bytes > MAX_WAITING_BYTES:
                raise self._failed(
                    "behind", f"the store is behind: {self._num_waiting:,} writes and reads wait for its disk"
                )
            self._num_waiting += 1
            self._num_bytes += num_bytes
            job = _Job(work, Future(), num_bytes)
            self._queue.put(job)
        return job.result

    async def run(self, work: Work[T], num_bytes: int = 0) -> T:
        """The result of `work`. Raises StoreFailed, also when it takes longer than `WAIT_S`."""
        try:
            async with asyncio.timeout(WAIT_S):
                return await asyncio.wrap_future(self.submit(work, num_bytes))
        except TimeoutError:
            raise self._failed("slow", f"the store did not answer within {WAIT_S:g} s") from None

    def close(self) -> None:
        """Do what was submitted, for at most `CLOSE_S`, and close the file. May be called twice."""
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
            except Exception as error:  # the request that waits for the future gets it
                _settle(job.result, error=error)
            else:
                _settle(job.result, result)
            if time.monotonic() >= next_chore:  # a queue that is never empty must not delay it for ever
                next_chore = self._do_chore()

    def _do_chore(self) -> float:
        """Do it, and tell when it is due again (monotonic seconds). Whatever happens, the thread goes on."""
        try:
            if self._connection is None:
                self._open_again()
            self._transact(self._chore)
        except StoreFailed:  # counted and logged
            pass
        except Exception:
            log.exception("the store's regular work failed", extra={"path": self.path})
        return time.monotonic() + self._chore_s

    def _open_again(self) -> None:
        try:
            self._connection = _opened(self.path, self._schema, self._busy_s)
        except (sqlite3.Error, OSError) as error:
            raise self._closed_by(error) from error
        log.info("the store of %s is open: the disk is no longer full", self._name, extra={"path": self.path})

    def _closed_by(self, error: Exception) -> StoreFailed:
        reason = _reason(error) if isinstance(error, sqlite3.Error) else "error"
        return self._failed("full" if _has_no_room(self.path, error) else reason, f"it cannot be opened: {error}")

    def _transact(self, work: Work[T]) -> T:
        connection = self._connection
        if connection is None:
            raise self._failed("full", "it is not open, because the disk was full at startup")
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
            raise self._failed(_reason(error), f"the store failed: {error}") from error
        return result

    def _failed(self, reason: str, message: str) -> StoreFailed:
        self._on_failure(reason)
        now = time.monotonic()
        if now - self._complained_at >= REMIND_S:
            self._complained_at = now
            log.error("the store of %s fails: %s", self._name, message, extra={"path": self.path, "reason": reason})
        return StoreFailed(reason, message)


def _opened(path: str, schema: Schema, busy_s: float) -> sqlite3.Connection:
    if path != IN_MEMORY:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))  # conversations are their owner's alone
    connection = sqlite3.connect(path, timeout=busy_s, isolation_level=None, check_same_thread=False)
    try:
        _check_format(connection, schema)
        for statement in (
            "PRAGMA auto_vacuum = INCREMENTAL",  # before the first table
            "PRAGMA secure_delete = ON",  # what is deleted must not stay in the file
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
    """Raises sqlite3.DatabaseError for a file of another program, of a newer version, or that is damaged."""
    connection.execute("BEGIN")  # one view of the file: another process may be making its tables
    try:
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        (num_tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    finally:
        if connection.in_transaction:  # SQLite has already ended it if the disk is full
            connection.execute("ROLLBACK")
    if num_tables and application != schema.application_id:
        raise sqlite3.DatabaseError("it is a database of another program")
    if version > schema.version:
        known = f"this program knows versions up to {schema.version}"
        raise sqlite3.DatabaseError(f"it is of version {version}, and {known}")
    for what in schema.checked if num_tables and schema.checked else ("1",):
        (found,) = connection.execute(f"PRAGMA quick_check({what})").fetchone()
        if found != "ok":
            raise sqlite3.DatabaseError(f"it is damaged: {' '.join(str(found).split())}")


def _create_tables(connection: sqlite3.Connection, schema: Schema) -> None:
    """Raises sqlite3.OperationalError for a file that cannot be written."""
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
    """The statements of a script; those of a trigger belong together."""
    statements, begun = [], ""
    for line in script.splitlines(keepends=True):
        begun += line
        if sqlite3.complete_statement(begun):
            statements.append(begun)
            begun = ""
    return statements


def _write_ahead(connection: sqlite3.Connection, busy_s: float) -> str:
    """The journal mode after asking for WAL. SQLite does not wait by itself for another process that opens the file."""
    until = time.monotonic() + busy_s
    while True:
        try:
            (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
            return str(mode)
        except sqlite3.OperationalError as error:
            if _reason(error) != "busy" or time.monotonic() > until:
                raise
            time.sleep(RETRY_S)


def _has_no_room(path: str, error: Exception) -> bool:
    """Whether a file cannot be opened because its disk is full. SQLite has several errors for this."""
    if isinstance(error, OSError):
        return error.errno in NO_ROOM
    if path == IN_MEMORY or not isinstance(error, sqlite3.OperationalError):
        return False
    return _reason(error) == "full" or is_full(Path(path).parent)


def _reason(error: sqlite3.Error) -> str:
    """A short name of what went wrong, for a metric."""
    names = {"SQLITE_FULL": "full", "SQLITE_BUSY": "busy", "SQLITE_CORRUPT": "damaged", "SQLITE_NOTADB": "damaged"}
    return names.get("_".join(getattr(error, "sqlite_errorname", "").split("_")[:2]), "error")


def _settle(result: Future[T], value: T | None = None, error: Exception | None = None) -> None:
    with suppress(InvalidStateError):
        if error is None:
            result.set_result(value)  # type: ignore[arg-type]  # None only where T is None
        else:
            result.set_exception(error)
