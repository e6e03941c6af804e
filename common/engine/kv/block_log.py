"""Records the contents of a worker's prefix cache and tiers, and the changes that routers have not yet received."""

from __future__ import annotations

import threading

from common.wire.messages import MAX_SHORT_HASHES, SHORT_HASH_BYTES, BlockEvents, BlockSnapshot

MAX_CHANGES = 65_536
"""Maximum number of unsent changes. On overflow, routers see a sequence gap and request a snapshot."""


class BlockLog:
    """Collects changes on the block pool's thread; another thread takes them as messages for all routers.

    If a block enters and leaves between two `take` calls, only its last state is reported. The lists of an event are
    therefore unordered. A snapshot may include changes that the next event repeats.
    """

    def __init__(self, epoch: int = 0, max_changes: int = MAX_CHANGES) -> None:
        """`epoch`: the worker's epoch."""
        self.epoch, self._max_changes = epoch, max_changes
        self._lock = threading.Lock()
        self._held: set[bytes] = set()
        self._below: set[bytes] = set()  # in a tier, including blocks that are also in the prefix cache
        self._changed: dict[bytes, None] = {}
        self._cleared = self._overflowed = False
        self._sequence = 0

    @property
    def sequence(self) -> int:
        """Number of the last event that `take` returned, or that was lost to an overflow."""
        return self._sequence

    def stored(self, block_hash: bytes) -> None:
        """Record that the block entered the prefix cache."""
        short = block_hash[:SHORT_HASH_BYTES]
        with self._lock:
            self._held.add(short)
            self._change(short)

    def removed(self, block_hash: bytes) -> None:
        """Record that the block was evicted."""
        short = block_hash[:SHORT_HASH_BYTES]
        with self._lock:
            self._held.discard(short)
            self._change(short)

    def in_tier(self, block_hash: bytes, present: bool) -> None:
        """Record that the block entered or left the tiers below the prefix cache. Thread-safe."""
        short = block_hash[:SHORT_HASH_BYTES]
        with self._lock:
            (self._below.add if present else self._below.discard)(short)
            if short not in self._held:
                self._change(short)

    def cleared(self) -> None:
        """Record that the prefix cache dropped every block. The tiers are cleared as well."""
        with self._lock:
            self._held.clear()
            self._changed.clear()
            self._cleared, self._overflowed = True, False

    def take(self) -> list[BlockEvents]:
        """Return the changes since the last call. Must always be called from the same thread, any thread."""
        with self._lock:
            changed, self._changed = self._changed, {}
            cleared, self._cleared = self._cleared, False
            overflowed, self._overflowed = self._overflowed, False
            if overflowed:
                self._sequence += 1
                return []
            events = []
            hashes = list(changed)
            for first in range(0, len(hashes) or int(cleared), MAX_SHORT_HASHES):
                self._sequence += 1
                chunk = hashes[first : first + MAX_SHORT_HASHES]
                gone = [short for short in chunk if short not in self._held]
                events.append(
                    BlockEvents(
                        epoch=self.epoch,
                        sequence=self._sequence,
                        stored=b"".join(short for short in chunk if short in self._held),
                        removed=b"".join(gone),
                        cleared=cleared and not first,
                        below=b"".join(short for short in gone if short in self._below),
                    )
                )
            return events

    def snapshot(self) -> list[BlockSnapshot]:
        """Return all blocks of the prefix cache and tiers, in one or more pieces. Thread-safe."""
        with self._lock:
            parts = [b"".join(self._held), b"".join(self._below - self._held)]
            sequence = self._sequence
        size = SHORT_HASH_BYTES * MAX_SHORT_HASHES
        pieces = [
            (hashes[first : first + size], is_below)
            for hashes, is_below in zip(parts, (False, True), strict=True)
            for first in range(0, len(hashes), size)
        ] or [(b"", False)]
        return [
            BlockSnapshot(
                epoch=self.epoch,
                sequence=sequence,
                piece=number,
                num_pieces=len(pieces),
                **{"below" if is_below else "hashes": hashes},
            )
            for number, (hashes, is_below) in enumerate(pieces)
        ]

    def _change(self, short: bytes) -> None:
        if self._overflowed:
            return
        self._changed[short] = None
        if len(self._changed) > self._max_changes:
            self._changed.clear()
            self._cleared, self._overflowed = False, True
