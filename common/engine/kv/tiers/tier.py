"""One tier: a slot store and the table of its contents. Used by the writer and reader threads and the engine."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Protocol

from common.engine.kv.tiers.counts import TierCounts
from common.engine.kv.tiers.slot_table import SlotTable
from common.latency import LinkFit, LinkModel

log = logging.getLogger(__name__)
ASSUMED_READ_BYTES_S = 5e8
"""Assumed read throughput, in bytes per second, until a read has been measured."""


class SlotStore(Protocol):
    """Store of one block per slot. Threads may call `read` concurrently, but not for a slot being written."""

    num_slots: int
    block_bytes: int

    @property
    def found(self) -> Iterable[tuple[int, int, bytes]]:
        """Blocks present at startup: (write number, slot, hash)."""

    def write(self, slot: int, block_hash: bytes, block: memoryview) -> None:
        """Write a block. Raises OSError."""

    def read(self, slot: int, block_hash: bytes, into: memoryview) -> bool:
        """Read a block; False if the slot does not contain it intact. Raises OSError."""

    def clear(self) -> None:
        """Drop all blocks. Raises OSError."""

    def close(self) -> None: ...


class BlockTier:
    """A tier. After an I/O error it is disabled until the worker restarts.

    One thread writes, other threads read, and any thread may query the contents. `on_change(hash, held)` is called, on
    the thread that made the change, for every block added or removed. `life` increases whenever all blocks are dropped.
    """

    def __init__(self, name: str, store: SlotStore) -> None:
        self.name, self._store = name, store
        self._lock = threading.Lock()
        self._table = SlotTable(store.num_slots, store.found)
        self.life = 0
        self._fit = LinkFit()
        self._assumed = LinkModel(byte_s=1 / ASSUMED_READ_BYTES_S, block_bytes=store.block_bytes)
        self.on_change: Callable[[bytes, bool], None] = lambda block_hash, held: None
        self.is_on = True
        self.num_written = self.num_corrupt = 0

    @property
    def num_slots(self) -> int:
        return self._store.num_slots

    @property
    def block_bytes(self) -> int:
        return self._store.block_bytes

    @property
    def link(self) -> LinkModel:
        """Measured read time; an assumption until the first read."""
        return self._fit.model if self._fit.model.is_known else self._assumed

    def counts(self, num_lost: int) -> TierCounts:
        num_blocks, num_slots = len(self._table), self.num_slots
        return TierCounts(self.name, num_blocks, num_slots, self.is_on, self.num_written, self.num_corrupt, num_lost)

    # ------------------------------------------------------------ any thread

    def holds(self, block_hash: bytes) -> bool:
        return block_hash in self._table

    def hashes(self) -> list[bytes]:
        with self._lock:
            return self._table.hashes()

    def touch(self, hashes: Iterable[bytes]) -> None:
        """Mark blocks as recently used, wherever they were found."""
        with self._lock:
            for block_hash in hashes:
                self._table.touch(block_hash)

    def reset(self) -> None:
        """Drop all blocks. The writer thread must call `clear_store` before its next write."""
        with self._lock:
            self._lose_all()

    # ------------------------------------------------------------ writer thread

    def clear_store(self) -> None:
        if self.is_on:
            try:
                self._store.clear()
            except OSError as error:
                self.fail("cleared", error)

    def write(self, block_hash: bytes, block: memoryview, life: int) -> None:
        """Store a block, evicting the least recently used one. Does nothing if `life` is outdated."""
        with self._lock:
            if life != self.life or block_hash in self._table or (room := self._table.allocate()) is None:
                return
            slot, evicted = room
            if evicted:
                self.on_change(evicted, False)
        try:
            self._store.write(slot, block_hash, block)
        except OSError as error:
            self.fail("written", error)
            with suppress(OSError):  # a full disk must not stay full of blocks that nothing can read
                self._store.clear()
            return
        with self._lock:
            if life == self.life:
                self._table.fill(slot, block_hash)
                self.num_written += 1
                self.on_change(block_hash, True)

    # ------------------------------------------------------------ reader threads

    def read(self, block_hash: bytes, into: memoryview) -> bool:
        """Read a block; False if it is missing or damaged. Damaged blocks are dropped."""
        with self._lock:
            slot = self._table.begin_read(block_hash)
            life = self.life
        if slot is None:
            return False
        try:
            if self._store.read(slot, block_hash, into):
                return True
            log.warning("%s tier: dropped a block that failed its checksum", self.name)
        except OSError as error:
            self.fail("read", error)
            return False
        finally:
            with self._lock:
                if life == self.life:
                    self._table.end_read(block_hash)
        self._forget(block_hash, life)
        return False

    def observe(self, num_blocks: int, seconds: float) -> None:
        """Record the duration of reading `num_blocks` blocks."""
        size = self._store.block_bytes
        self._fit.observe(num_blocks * size, seconds, size)

    # ------------------------------------------------------------ internal

    def _forget(self, block_hash: bytes, life: int) -> None:
        """Drop a damaged block. Its slot fails the checksum until it is overwritten."""
        with self._lock:
            if life == self.life and self._table.drop(block_hash) is not None:
                self.num_corrupt += 1
                self.on_change(block_hash, False)

    def fail(self, what: str, why: Exception | str) -> None:
        """Disable the tier because a block could not be `what` (a past participle)."""
        with self._lock:
            if not self.is_on:
                return
            self.is_on, num_lost = False, len(self._table)
            self._lose_all()
        log.error(
            "%s tier: disabled until the worker restarts: a block could not be %s (%s). "
            "Dropped %d blocks (capacity %d); affected prompts are computed instead",
            *(self.name, what, getattr(why, "strerror", None) or why, num_lost, self.num_slots),
        )

    def _lose_all(self) -> None:
        lost, self._table = self._table.hashes(), SlotTable(self.num_slots if self.is_on else 0)
        self.life += 1
        for block_hash in lost:  # afterwards, because the listener asks which tiers hold the block
            self.on_change(block_hash, False)

    def close(self) -> None:
        self._store.close()


def num_leading(tiers: Sequence[BlockTier], hashes: Sequence[bytes]) -> int:
    """Return how many of the chain's leading blocks are in any tier."""
    for count, block_hash in enumerate(hashes):
        if not any(tier.holds(block_hash) for tier in tiers):
            return count
    return len(hashes)
