"""Usage of API keys at each process of a router, in shared memory.

Each process writes its own file and reads those of the others, so no lock is required. A file has one row per key: what
was granted since the file was created, the number of running requests, and how much of the key's allowance was used at
a time of the machine's monotonic clock.
"""

from __future__ import annotations

import logging
import mmap
import os
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from common.machine import write_failure
from router.siblings.part import RouterPart

log = logging.getLogger(__name__)
MAX_KEYS = 65_536
"""Maximum number of rows per file, which is then 4 MiB."""
COLUMNS = 8
"""Number of cells in a row."""
ID, REQUESTS, TOKENS, ACTIVE, USED_REQUESTS, USED_TOKENS, AT, _ = range(COLUMNS)
CELL_BYTES = 8
"""Size of a cell."""
ROW_BYTES = CELL_BYTES * COLUMNS
NUM_BYTES = ROW_BYTES * (MAX_KEYS + 1)
"""Size of the file. Its first row contains the number of rows. The file is sparse: unused rows take no memory."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Requests and tokens granted so far, and running requests."""

    requests: float = 0.0
    tokens: float = 0.0
    active: float = 0.0


@dataclass(frozen=True, slots=True)
class UsedUp:
    """How much of a key's allowance was used at the time `at`, according to one process."""

    requests: float
    tokens: float
    at: float


class UsageTable:
    """The file of one process. `counts` are its cells as doubles, `ids` the same cells as integers.

    Writing to a mapped row without disk space would kill the process, so space is allocated first. If that fails, usage
    is not shared for the key, or for all keys: each process then applies the key's limits separately.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, NUM_BYTES)
            is_shared = _allocate(descriptor, 0)
            cells = memoryview(mmap.mmap(descriptor if is_shared else -1, NUM_BYTES))
        finally:
            os.close(descriptor)
        self.counts, self.ids = cells.cast("d"), cells.cast("Q")
        self._rows: dict[int, int] = {}
        self._num_known = 0

    def reset_active(self) -> None:
        """Reset the running requests after a restart. What was granted before still counts."""
        self._read_rows()
        for row in self._rows.values():
            self.counts[COLUMNS * row + ACTIVE] = 0.0

    def row_of(self, key_id: int) -> int:
        """Return the row of a key, or 0."""
        row = self._rows.get(key_id, 0)
        if not row and self._num_known < self.ids[0]:
            self._read_rows()
            row = self._rows.get(key_id, 0)
        return row

    def add_row(self, key_id: int) -> int:
        """Return the row of a key, which is added if necessary; 0 if the table is full. Only for the file's writer."""
        row = self.row_of(key_id)
        if not row and self._num_known < MAX_KEYS and self._allocate_row(self._num_known + 1):
            row = self._num_known + 1
            self.ids[COLUMNS * row + ID] = key_id
            self.ids[0] = row  # last, so that readers find the row complete
            self._read_rows()
        return row

    def _allocate_row(self, row: int) -> bool:
        """Allocate disk space for a row. Return whether that succeeded."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return _allocate(descriptor, row)
        finally:
            os.close(descriptor)

    def _read_rows(self) -> None:
        for row in range(self._num_known + 1, self.ids[0] + 1):
            self._rows[self.ids[COLUMNS * row + ID]] = row
            self._num_known = row


def _allocate(descriptor: int, row: int) -> bool:
    try:
        if hasattr(os, "posix_fallocate"):  # not on macOS
            os.posix_fallocate(descriptor, row * ROW_BYTES, ROW_BYTES)
    except OSError as error:
        file = os.readlink(f"/proc/self/fd/{descriptor}") if os.path.exists("/proc/self/fd") else "the usage file"
        why = write_failure(file, error, ROW_BYTES)
        log.error("cannot share key usage between router processes; each applies limits separately: %s", why)
        return False
    return True


class KeyUsage:
    """Usage of one key: written for this process, read for the others."""

    def __init__(self, own: UsageTable, others: list[UsageTable], name: str) -> None:
        self._id = int.from_bytes(blake2b(name.encode(), digest_size=CELL_BYTES).digest()) or 1
        self._own, self._others, self._row = own, others, own.add_row(self._id)

    def add(self, requests: int = 0, tokens: int = 0, active: int = 0) -> None:
        """Count what was granted to the key by this process, and running requests."""
        if self._row:
            first, counts = COLUMNS * self._row, self._own.counts
            counts[first + REQUESTS] += requests
            counts[first + TOKENS] += tokens
            counts[first + ACTIVE] += active

    def saw(self, used: UsedUp) -> None:
        """Publish how much of the allowance this process considers used."""
        if self._row:
            first, counts = COLUMNS * self._row, self._own.counts
            counts[first + USED_REQUESTS], counts[first + USED_TOKENS], counts[first + AT] = (
                used.requests,
                used.tokens,
                used.at,
            )

    def seen(self) -> list[UsedUp]:
        """Return the latest publication of each process, including this one and its predecessor."""
        found = []
        for table in (self._own, *self._others):
            if row := table.row_of(self._id):
                first, counts = COLUMNS * row, table.counts
                found.append(UsedUp(counts[first + USED_REQUESTS], counts[first + USED_TOKENS], counts[first + AT]))
        return found

    def of_others(self) -> Usage:
        """Return the total usage at the other processes."""
        requests = tokens = active = 0.0
        for table in self._others:
            if row := table.row_of(self._id):
                first, counts = COLUMNS * row, table.counts
                requests += counts[first + REQUESTS]
                tokens += counts[first + TOKENS]
                active += counts[first + ACTIVE]
        return Usage(requests, tokens, active)


class SharedUsage:
    """Usage files of all processes. Raises OSError if the folder is not writable."""

    def __init__(self, part: RouterPart) -> None:
        tables = [UsageTable(part.folder / f"{index}.usage") for index in range(part.count)]
        self._own = tables[part.index]
        self._own.reset_active()
        self._others = [tables[index] for index in part.others]

    def of_key(self, name: str) -> KeyUsage:
        """Return the usage of a key by name; "" stands for requests without a key."""
        return KeyUsage(self._own, self._others, name)
