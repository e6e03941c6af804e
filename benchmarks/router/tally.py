"""Counters in shared memory: each load process writes its own row, and every other process reads the sums."""

from __future__ import annotations

import ctypes
import multiprocessing
from typing import Final

SPAWN: Final = multiprocessing.get_context("spawn")
TOKENS, EVENTS, STARTED, ENDED, ANSWERS, FAILED = range(6)
NUM_FIELDS: Final = 6


class Tally:
    """What clients have received so far: tokens, events, streams that began and ended, whole answers, failures."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self.cells = SPAWN.RawArray(ctypes.c_uint64, NUM_FIELDS * num_rows)

    def total(self, field: int) -> int:
        """The sum of a field over all rows."""
        return sum(self.cells[field::NUM_FIELDS])


class Row:
    """The row of one process."""

    def __init__(self, tally: Tally, number: int) -> None:
        self._cells, self._first = tally.cells, NUM_FIELDS * number

    def add(self, field: int, count: int = 1) -> None:
        self._cells[self._first + field] += count
