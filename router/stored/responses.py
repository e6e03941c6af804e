"""Store of responses, limited in bytes, number and age. Only the API key that created a response can access it.

A background response has a lease, which its router renews. If the lease has expired, the router ended without storing
the result, and every router reports the response as incomplete.
"""

from __future__ import annotations

import sqlite3
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress

from common.machine import AGES_S, WALL_CLOCK, WallClock
from router.stored.database import (
    CHORE_S,
    LEASE_S,
    MAX_DELETED,
    VACUUM_PAGES,
    Database,
    Schema,
    counted_by_owner,
    lease_bounds,
)
from router.stored.errors import ConversationGone, ConversationTooLong, RecordTooLarge, StoreFailed
from router.stored.records import RUNNING, StoredResponse, StoredTurn, StoreSize

RESPONSE_TABLES = f"""
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY,
    owner TEXT NOT NULL,
    previous TEXT,
    status TEXT NOT NULL,
    background INTEGER NOT NULL,
    used_at REAL NOT NULL,
    router TEXT NOT NULL,
    lease_until REAL NOT NULL,
    cancel INTEGER NOT NULL DEFAULT 0,
    input BLOB NOT NULL,
    head BLOB NOT NULL,
    output BLOB NOT NULL,
    num_bytes INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS responses_by_use ON responses (used_at);
CREATE INDEX IF NOT EXISTS responses_by_owner ON responses (owner, used_at);
CREATE INDEX IF NOT EXISTS responses_by_router ON responses (router) WHERE router != '';
{counted_by_owner("responses", "owners", "num_entries")}"""
RESPONSES = Schema("responses", application_id=0x64707463, version=1, tables=RESPONSE_TABLES)
LARGEST_SHARE = 4
"""Divisor of the store's size for the maximum size of one response."""
MAX_TURNS = 10_000
"""Maximum number of responses in a conversation. Limits the recursion that collects them."""
CHAIN = """
WITH RECURSIVE chain (id, previous, depth) AS (
    SELECT id, previous, 0 FROM responses WHERE id = :id AND owner = :owner AND used_at > :oldest
    UNION ALL
    SELECT r.id, r.previous, depth + 1 FROM chain JOIN responses AS r ON r.id = chain.previous
    WHERE r.owner = :owner AND r.used_at > :oldest AND depth < :most
)
SELECT chain.id, chain.previous, length(input) + length(output)
FROM chain JOIN responses ON responses.id = chain.id ORDER BY depth
"""
COLUMNS = "id, owner, status, input, head, output, previous, background"


class ResponseStore:
    """SQLite store of responses at `path` (":memory:": not persistent). Raises sqlite3.Error or OSError.

    `on_failure` is called on any thread, with the reason of each failure. `on_cancel` is called on the store's thread,
    with the ids of this router's running responses that another router was asked to cancel, or has deleted.
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
        self.path = path
        self._max_bytes, self._max_entries, self._max_age_s = max_bytes, max_entries, max_age_s
        self._on_failure, self._clock = on_failure, clock
        self._router = uuid.uuid4().hex
        self._running: set[str] = set()
        self.on_cancel: Callable[[Sequence[str]], None] = lambda ids: None
        self.size = StoreSize()
        self._has_begun = False
        self._database = Database(path, RESPONSES, on_failure, self._maintain, chore_s)
        self._database.submit(self._begin)

    def close(self) -> None:
        """Complete queued writes, and close the file."""
        self._database.close()

    # ------------------------------------------------------------ writing

    def keep(self, record: StoredResponse) -> None:
        """Store a finished response without waiting. A response that cannot be stored is lost, and counted."""
        with suppress(StoreFailed):  # already counted and logged
            self._check_size(record)
            self._database.submit(lambda connection: self._insert(connection, record, running=False), record.num_bytes)

    async def begin(self, record: StoredResponse) -> None:
        """Store a background response of this router, with a lease. Raises StoreFailed."""
        self._check_size(record)
        await self._database.run(lambda connection: self._insert(connection, record, running=True), record.num_bytes)
        self._running.add(record.id)

    def note(self, record: StoredResponse) -> None:
        """Update the status and head of a running response without waiting."""

        def work(connection: sqlite3.Connection) -> None:
            statement = "UPDATE responses SET status = ?, head = ?, num_bytes = ? WHERE id = ? AND router = ?"
            connection.execute(statement, (record.status, record.head, record.num_bytes, record.id, self._router))

        with suppress(StoreFailed):
            self._database.submit(work, record.num_bytes)

    async def finish(self, record: StoredResponse) -> bool:
        """Store the result of a response from `begin`. Return False if it has been deleted. Raises StoreFailed.

        If that fails, the lease expires, and the response is reported as incomplete.
        """
        self._running.discard(record.id)

        def work(connection: sqlite3.Connection) -> bool:
            updated = connection.execute(
                "UPDATE responses SET status = ?, head = ?, output = ?, num_bytes = ?, used_at = ?, router = '', "
                "lease_until = 0 WHERE id = ? AND router = ?",
                (
                    *(record.status, record.head, record.output, record.num_bytes, self._clock.now()),
                    *(record.id, self._router),
                ),
            )
            self._evict(connection)
            return updated.rowcount > 0

        return await self._database.run(work, record.num_bytes)

    async def delete(self, response_id: str, owner: str) -> bool:
        """Delete a response. Return whether it existed. Raises StoreFailed."""

        def work(connection: sqlite3.Connection) -> bool:
            statement = "DELETE FROM responses WHERE id = ? AND owner = ? AND used_at > ?"
            found = connection.execute(statement, (response_id, owner, self._oldest)).rowcount > 0
            self._measure(connection)
            return found

        return await self._database.run(work)

    async def ask_to_cancel(self, response_id: str, owner: str) -> None:
        """Request the router that generates a response to cancel it. Raises StoreFailed."""
        statement = "UPDATE responses SET cancel = 1 WHERE id = ? AND owner = ? AND router != ''"
        await self._database.run(lambda connection: connection.execute(statement, (response_id, owner)).rowcount)

    async def settle(self) -> None:
        """Wait until all earlier writes are visible to other processes. Raises StoreFailed."""
        await self._database.run(lambda connection: None)

    # ------------------------------------------------------------ reading

    async def find(self, response_id: str, owner: str) -> tuple[StoredResponse, bool] | None:
        """Return a response, and whether its router ended before completing it. Raises StoreFailed."""

        def work(connection: sqlite3.Connection) -> tuple[StoredResponse, bool] | None:
            statement = f"SELECT {COLUMNS}, lease_until FROM responses WHERE id = ? AND owner = ? AND used_at > ?"
            row = connection.execute(statement, (response_id, owner, self._oldest)).fetchone()
            if row is None:
                return None
            name, of, status, given, head, output, previous, background, lease_until = row
            found = StoredResponse(name, of, status, given, head, output, previous, bool(background))
            first, last = lease_bounds(self._clock)
            return found, status in RUNNING and not first <= lease_until <= last

        return await self._database.run(work)

    async def conversation(self, response_id: str, owner: str, max_bytes: int) -> list[StoredTurn]:
        """Return the responses of a conversation up to this one. Resets the age of each.

        Empty if the response does not exist. Raises ConversationGone if an earlier response is no longer stored,
        ConversationTooLong above the limits, and StoreFailed.
        """
        return await self._database.run(lambda connection: self._turns(connection, response_id, owner, max_bytes))

    async def turns_left(self, response_id: str, owner: str, max_bytes: int) -> list[StoredTurn]:
        """Return the stored part of a conversation, without changing ages. Raises like `conversation`."""
        return await self._database.run(
            lambda connection: self._turns(connection, response_id, owner, max_bytes, whole=False)
        )

    # ------------------------------------------------------------ inside a transaction

    def _check_size(self, record: StoredResponse) -> None:
        if record.num_bytes * LARGEST_SHARE > self._max_bytes:
            self._on_failure("too_large")
            raise RecordTooLarge(
                f"the response has {record.num_bytes:,} bytes; the maximum is {self._max_bytes // LARGEST_SHARE:,}"
            )

    def _insert(self, connection: sqlite3.Connection, record: StoredResponse, *, running: bool) -> None:
        now = self._clock.now()
        connection.execute(
            f"INSERT INTO responses ({COLUMNS}, used_at, router, lease_until, num_bytes) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                *(record.id, record.owner, record.status, record.input, record.head, record.output, record.previous),
                *(record.background, now, self._router if running else "", now + LEASE_S if running else 0.0),
                record.num_bytes,
            ),
        )
        self._evict(connection)

    def _evict(self, connection: sqlite3.Connection) -> None:
        """Delete least recently used responses of the key with the most bytes, until the limits are met."""
        for _ in range(MAX_DELETED):
            size = self._measure(connection)
            if size.num_bytes <= self._max_bytes and size.num_entries <= self._max_entries:
                return
            (owner,) = connection.execute("SELECT owner FROM owners ORDER BY num_bytes DESC LIMIT 1").fetchone()
            deleted = connection.execute(
                "DELETE FROM responses WHERE id = (SELECT id FROM responses WHERE owner = ? "
                "AND lease_until NOT BETWEEN ? AND ? ORDER BY used_at LIMIT 1)",
                (owner, *lease_bounds(self._clock)),
            )
            if not deleted.rowcount:  # only running responses are left, whose number is limited elsewhere
                return

    def _measure(self, connection: sqlite3.Connection) -> StoreSize:
        row = connection.execute("SELECT total(num_entries), total(num_bytes) FROM owners").fetchone()
        self.size = StoreSize(int(row[0]), int(row[1]))
        return self.size

    def _turns(
        self, connection: sqlite3.Connection, response_id: str, owner: str, max_bytes: int, *, whole: bool = True
    ) -> list[StoredTurn]:
        named = {"id": response_id, "owner": owner, "oldest": self._oldest, "most": MAX_TURNS}
        chain = connection.execute(CHAIN, named).fetchall()
        if not chain:
            return []
        num_bytes = sum(size for _, _, size in chain)
        if num_bytes > max_bytes or len(chain) > MAX_TURNS:
            raise ConversationTooLong(
                f"the conversation up to {response_id!r} has {len(chain):,} responses and {num_bytes:,} bytes; "
                f"the maximum is {MAX_TURNS:,} responses and {max_bytes:,} bytes"
            )
        missing = chain[-1][1]
        if whole and missing is not None:
            raise ConversationGone(missing)
        turns = []
        for name, _, _ in reversed(chain):
            statement = "SELECT id, status, input, output FROM responses WHERE id = ?"
            turns.append(StoredTurn(*connection.execute(statement, (name,)).fetchone()))
        if whole:
            now = self._clock.now()
            connection.executemany("UPDATE responses SET used_at = ? WHERE id = ?", [(now, turn.id) for turn in turns])
        return turns

    def _begin(self, connection: sqlite3.Connection) -> None:
        """Advance the clock to the store's last time stamp. It may have been set back while no router ran."""
        if not self._has_begun:
            (latest,) = connection.execute("SELECT max(used_at) FROM responses").fetchone()
            if latest is not None:
                self._clock.observe(latest)
            self._has_begun = True

    def _maintain(self, connection: sqlite3.Connection) -> None:
        """Renew leases, collect cancellation requests and deletions, and delete expired responses."""
        self._begin(connection)
        lease_until = self._clock.now() + LEASE_S
        ids = []
        for name in list(self._running):
            renewed = connection.execute(
                "UPDATE responses SET lease_until = ? WHERE id = ? AND router = ?", (lease_until, name, self._router)
            )
            if not renewed.rowcount:
                ids.append(name)
        asked = connection.execute(
            "SELECT id FROM responses WHERE router != '' AND router = ? AND cancel = 1", (self._router,)
        )
        ids += [name for (name,) in asked]
        connection.execute(
            "DELETE FROM responses WHERE id IN "
            "(SELECT id FROM responses WHERE used_at <= ? AND lease_until NOT BETWEEN ? AND ? LIMIT ?)",
            (self._oldest, *lease_bounds(self._clock), MAX_DELETED),
        )
        self._evict(connection)
        connection.execute(f"PRAGMA incremental_vacuum({VACUUM_PAGES})").fetchall()
        if ids:
            self.on_cancel(ids)

    @property
    def _oldest(self) -> float:
        """Time of last use before which responses have expired."""
        return self._clock.earliest(AGES_S) - self._max_age_s
