"""What the keys of API clients have used at each process of a router, in memory that all of them map.

Each process writes a file of its own and reads those of the others, so no lock is needed: a row for each key, with what
was granted to it here since the file was made, how many of its requests are served here now, and how much of its
allowance this process saw used up, at which time of the machine's clock.
"""

from __future__ import annotations

import logging
import mmap
import os
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from router.siblings.part import RouterPart

log = logging.getLogger(__name__)
MAX_KEYS = 65_536
"""Rows of the table in shared memory: 4 MiB."""
COLUMNS = 8
"""Numbers of a key's row."""
ID, REQUESTS, TOKENS, ACTIVE, USED_REQUESTS, USED_TOKENS, AT, _ = range(COLUMNS)
CELL_BYTES = 8
"""Of a number in the table."""
ROW_BYTES = CELL_BYTES * COLUMNS
NUM_BYTES = ROW_BYTES * (MAX_KEYS + 1)
"""The first row holds the number of rows. The file is sparse: only rows that are used take memory."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Requests and tokens granted so far, and requests served now."""

    requests: float = 0.0
    tokens: float = 0.0
    active: float = 0.0


@dataclass(frozen=True, slots=True)
class UsedUp:
    """What one process saw used of a key's allowance at the time `at`."""

    requests: float
    tokens: float
    at: float


class UsageTable:
    """The file of one process. Its `counts` are doubles, its `ids` the same cells as integers.

    Writing to a mapped row without disk space would kill the process, so the space is allocated first. If that fails,
    the usage of a key, or of all keys, is not shared: each process applies the key's limits separately.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, NUM_BYTES)
            has_room = _take_room(descriptor, 0)
            cells = memoryview(mmap.mmap(descriptor if has_room else -1, NUM_BYTES))
        finally:
            os.close(descriptor)
        self.counts, self.ids = cells.cast("d"), cells.cast("Q")
        self._rows: dict[int, int] = {}
        self._num_known = 0

    def begin_anew(self) -> None:
        """The process before this one has ended: it serves nothing now, and what it granted stays granted."""
        self._look()
        for row in self._rows.values():
            self.counts[COLUMNS * row + ACTIVE] = 0.0

    def row_of(self, key_id: int) -> int:
        """The row of a key; 0 if there is none yet."""
        row = self._rows.get(key_id, 0)
        if not row and self._num_known < self.ids[0]:
            self._look()
            row = self._rows.get(key_id, 0)
        return row

    def add_row(self, key_id: int) -> int:
        """A row for a key, by the only process that writes here; 0 when all are taken."""
        row = self.row_of(key_id)
        if not row and self._num_known < MAX_KEYS and self._has_room(self._num_known + 1):
            row = self._num_known + 1
            self.ids[COLUMNS * row + ID] = key_id
            self.ids[0] = row  # last: a reader finds the row complete
            self._look()
        return row

    def _has_room(self, row: int) -> bool:
        """Allocate disk space for a row. Returns whether that succeeded."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return _take_room(descriptor, row)
        finally:
            os.close(descriptor)

    def _look(self) -> None:
        for row in range(self._num_known + 1, self.ids[0] + 1):
            self._rows[self.ids[COLUMNS * row + ID]] = row
            self._num_known = row


def _take_room(descriptor: int, row: int) -> bool:
    try:
        if hasattr(os, "posix_fallocate"):  # macOS does not have it
            os.posix_fallocate(descriptor, row * ROW_BYTES, ROW_BYTES)
    except OSError as error:
        log.error("cannot share the usage of a key between the router's processes: %s", error)
        return False
    return True


class KeyUsage:
    """One key: what is written here, and read of the others."""

    def __init__(self, own: UsageTable, others: list[UsageTable], name: str) -> None:
        self._id = int.from_bytes(blake2b(name.encode(), digest_size=CELL_BYTES).digest()) or 1
        self._own, self._others, self._row = own, others, own.add_row(self._id)

    def add(self, requests: int = 0, tokens: int = 0, active: int = 0) -> None:
        """Something was granted to the key here."""
        if self._row:
            first, counts = COLUMNS * self._row, self._own.counts
            counts[first + REQUESTS] += requests
            counts[first + TOKENS] += tokens
            counts[first + ACTIVE] += active

    def saw(self, used: UsedUp) -> None:
        """This process sees so much used up."""
        if self._row:
            first, counts = COLUMNS * self._row, self._own.counts
            counts[first + USED_REQUESTS], counts[first + USED_TOKENS], counts[first + AT] = (
                used.requests,
                used.tokens,
                used.at,
            )

    def seen(self) -> list[UsedUp]:
        """What each process saw last, this one and the one before it included."""
        found = []
        for table in (self._own, *self._others):
            if row := table.row_of(self._id):
                first, counts = COLUMNS * row, table.counts
                found.append(UsedUp(counts[first + USED_REQUESTS], counts[first + USED_TOKENS], counts[first + AT]))
        return found

    def of_others(self) -> Usage:
        """All that others granted, and serve."""
        requests = tokens = active = 0.0
        for table in self._others:
            if row := table.row_of(self._id):
                first, counts = COLUMNS * row, table.counts
                requests += counts[first + REQUESTS]
                tokens += counts[first + TOKENS]
                active += counts[first + ACTIVE]
        return Usage(requests, tokens, active)


class SharedUsage:
    """The tables of all processes. Raises OSError for a folder that cannot be written."""

    def __init__(self, part: RouterPart) -> None:
        tables = [UsageTable(part.folder / f"{index}.usage") for index in range(part.count)]
        self._own = tables[part.index]
        self._own.begin_anew()
        self._others = [tables[index] for index in part.others]

    def of_key(self, name: str) -> KeyUsage:
        """The usage of the key with this name, "" for requests without a key."""
        return KeyUsage(self._own, self._others, name)
