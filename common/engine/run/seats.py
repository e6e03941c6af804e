"""Seats of sequences on the device while recorded steps feed each other. This is the host's side, and the only writer.

    step N     rows  a b c d      seats  0 1 2 3
    step N+1   rows  a c d e      seats  0 2 3 1      b has ended; e is new and takes its seat

A row that continues a row of the previous step keeps its seat (`kernels/interface/seats.py`), which stores token,
position, block table and sampling parameters. The host keeps a copy, and sends only what the next step changes: seats
of new rows, new block table entries, the order of rows. Most steps send nothing or a few numbers. A row without a
predecessor gets a new seat, so a step after a pause, preemption, hand-over, failure or prompt does not depend on
earlier contents.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from common.blocks import HOLE, Window
from common.engine.kv import KVCache
from common.engine.models import SequenceChunk, check_chunk
from common.engine.sampling import draw_of
from common.errors import BlockError, ContextLengthExceeded, InvalidRequest
from common.model_files import ModelConfig
from kernels.interface import ADAPTER, BEFORE, POSITION, TABLE, TOP_K, TOP_P, Draw, SeatLayout

FROM_HOST = -1
"""Source of a row whose token comes from the host. Other sources are rows of the previous step."""
NO_SEAT = -1
MAX_TOP_K = 2**31 - 1
"""Upper limit of `top_k`, above any vocabulary size."""
Numbers = npt.NDArray[np.int64]


class SeatChanges(NamedTuple):
    """Changes of the device's seats before a step runs: `words` int64 [n] at `places`."""

    places: Numbers
    words: Numbers


class Seats:
    """Seats of a device. Not thread-safe. The device must apply the results of `take` in order."""

    def __init__(self, layout: SeatLayout, config: ModelConfig, kv: KVCache) -> None:
        self.layout, self._config, self._kv = layout, config, kv
        self._window = Window(config.window, kv.block_size)
        # Contents of the device after all launched steps.
        self._words: Numbers = np.zeros(layout.num_words, dtype=np.int64)
        self._words[: layout.num_seats] = NO_SEAT
        self._rows = self._words[: layout.num_seats]
        self._seats = self._words[layout.num_seats :].reshape(layout.num_seats, layout.seat_words)
        self._tables: list[Sequence[int]] = [()] * layout.num_seats
        self._lengths = np.zeros(layout.num_seats, dtype=np.int64)  # number of their entries on the device
        self._taken: list[int] = []  # seat of each row of the last step

    @property
    def has_adapters(self) -> bool:
        """Whether a row of the last step uses an adapter."""
        return bool((self._seats[self._taken, ADAPTER] >= 0).any())

    @property
    def searches(self) -> bool:
        """Whether a row of the last step has `top_k` or `top_p`."""
        top_k, top_p = self._seats[self._taken, TOP_K], self._seats[self._taken, TOP_P].view(np.float64)
        return bool(((top_k > 0) | (top_p < 1.0)).any())

    def take(self, chunks: Sequence[SequenceChunk], sources: Sequence[int]) -> SeatChanges:
        """Assign seats to the next step, whose chunk i continues row `sources[i]` of the last one (or FROM_HOST).

        The step must then run with these changes, or `forget` be called. Raises BlockError, InvalidRequest or
        ContextLengthExceeded before anything changes.
        """
        before, self._taken = self._taken, []
        if max(sources) >= len(before):
            raise InvalidRequest(f"a step continues row {max(sources)}, but the previous step had {len(before)} rows")
        seats = [before[source] if source >= 0 else NO_SEAT for source in sources]
        starts = np.array([chunk.start for chunk in chunks], dtype=np.int64)
        new = self._changed_rows(chunks, seats, starts)
        for row in new:
            self._check(chunks[row], sources[row])
        places, free = [], iter(set(range(self.layout.num_seats)).difference(seats) if new else ())
        for row in new:
            if seats[row] == NO_SEAT:
                seats[row] = next(free)
                places.append(self._sit_down(seats[row], chunks[row]))
            else:
                places.append(self._note_table(seats[row], chunks[row].block_table))
        taken = np.array(seats, dtype=np.int64)
        moved = taken[starts != self._seats[taken, POSITION]]
        self._seats[taken, POSITION] = starts
        changed = np.concatenate([*places, self._place_of(moved, POSITION), self._reorder(taken)])
        changes = SeatChanges(changed, self._words[changed])
        self._seats[taken, POSITION] += 1  # state after the step
        self._seats[taken, BEFORE] = np.arange(len(taken))
        self._taken = seats
        return changes

    def forget(self) -> None:
        """Forget the last step, so that no row can continue from it."""
        self._taken = []

    def check_integrity(self, memory: Tensor) -> None:
        """Wait for the device, and raise BlockError unless its `memory` matches the host's copy and block tables.

        For tests: takes as long as a step.
        """
        found = memory.cpu().numpy()
        seats = found[self.layout.num_seats :].reshape(self._seats.shape)
        if not np.array_equal(found[: self.layout.num_seats], self._rows):
            raise BlockError(f"the device has row order {found[: self.layout.num_seats]}, expected {self._rows}")
        for seat in self._taken:
            table = self._tables[seat]
            length = min(int(self._lengths[seat]), self.layout.width)
            there, known = seats[seat, : TABLE + length], self._seats[seat, : TABLE + length]
            if not np.array_equal(there, known):
                raise BlockError(f"seat {seat} is {there} on the device, expected {known}")
            wrong = [i for i in range(length) if table[i] not in (HOLE, known[TABLE + i])]
            if wrong:
                raise BlockError(f"seat {seat} differs from its sequence's block table in entries {wrong} of {length}")

    def _changed_rows(self, chunks: Sequence[SequenceChunk], seats: Sequence[int], starts: Numbers) -> list[int]:
        """Return the rows to update: without a seat, with another or a longer block table, or beyond its end."""
        tables = [chunk.block_table for chunk in chunks]
        is_other = list(map(operator.is_not, tables, [self._tables[seat] for seat in seats]))
        lengths, taken = np.array(list(map(len, tables))), np.array(seats)
        most = np.minimum(lengths, self.layout.width) * self.layout.block_size
        is_beyond = starts >= np.minimum(most, self._config.max_model_len)
        has_grown = lengths != self._lengths[taken]
        found: list[int] = np.flatnonzero(is_beyond | is_other | has_grown | (taken < 0)).tolist()
        return found

    def _check(self, chunk: SequenceChunk, source: int) -> None:
        """Validate a row to update, including all table entries that later steps will use."""
        check_chunk(chunk, self._config, self._kv)
        token_id, most = chunk.token_ids[0], self.layout.width * self.layout.block_size
        if source < 0 and not 0 <= token_id < self._config.vocab_size:
            raise InvalidRequest(f"token id {token_id} is outside of the vocabulary of {self._config.vocab_size}")
        if chunk.start >= most:
            raise ContextLengthExceeded(chunk.start + 1, most, 0)
        ahead = chunk.block_table[self._window.first_block(chunk.start) : self.layout.width]
        if min(ahead) < 0 or max(ahead) >= self._kv.num_blocks:
            raise BlockError(
                f"the block table has blocks {min(ahead)} to {max(ahead)}, the cache has {self._kv.num_blocks} blocks"
            )

    def _sit_down(self, seat: int, chunk: SequenceChunk) -> Numbers:
        """Write all of a seat. Return the places written."""
        draw = Draw() if chunk.params is None else draw_of(chunk.params, chunk.start)
        bits = struct.unpack("<qqq", struct.pack("<dfifi", draw.top_p, draw.temperature, 0, draw.min_p, 0))
        fields = (chunk.start, FROM_HOST, chunk.token_ids[0], chunk.adapter, draw.seed, *bits)
        self._seats[seat, :TABLE] = (*fields, min(draw.top_k, MAX_TOP_K))
        self._tables[seat] = ()
        entries = self._note_table(seat, chunk.block_table)
        return np.arange(entries[0] - TABLE, entries[-1] + 1)

    def _note_table(self, seat: int, table: Sequence[int]) -> Numbers:
        """Write a seat's table, or its new entries. Return their places."""
        first, end = 0, min(len(table), self.layout.width)
        if table is self._tables[seat]:  # only its end is new; entries that became holes are no longer read
            first = min(int(self._lengths[seat]), end)
        self._seats[seat, TABLE + first : TABLE + end] = table[first:end]
        self._tables[seat], self._lengths[seat] = table, len(table)
        start = self.layout.num_seats + seat * self.layout.seat_words + TABLE
        return np.arange(start + first, start + end)

    def _place_of(self, seats: Numbers, word: int) -> Numbers:
        return self.layout.num_seats + seats * self.layout.seat_words + word

    def _reorder(self, taken: Numbers) -> Numbers:
        """Write the order of rows. Return the places of rows that moved."""
        wanted = np.full_like(self._rows, NO_SEAT)
        wanted[: len(taken)] = taken
        differ = np.flatnonzero(wanted != self._rows)
        self._rows[:] = wanted
        return differ
