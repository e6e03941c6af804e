"""What the prefix cache of one worker holds, and what changed since routers were last told."""

from __future__ import annotations

import threading

from common.wire.messages import MAX_SHORT_HASHES, SHORT_HASH_BYTES, BlockEvents, BlockSnapshot

MAX_CHANGES = 65_536
"""Changes that wait to be told. With more, routers find a gap and ask for a snapshot."""


class BlockLog:
    """The block pool's thread notes every change; another thread takes them as messages to all routers.

    Of a block that comes and goes between two `take`s only the last is told, so the lists of an event have no order.
    A snapshot that is taken meanwhile may hold changes that the next event tells once more.
    """

    def __init__(self, epoch: int = 0, max_changes: int = MAX_CHANGES) -> None:
        """`epoch` is the worker's."""
        self.epoch, self._max_changes = epoch, max_changes
        self._lock = threading.Lock()
        self._held: set[bytes] = set()
        self._changes: dict[bytes, bool] = {}  # whether the block is there now
        self._cleared = self._overflowed = False
        self._sequence = 0

    @property
    def sequence(self) -> int:
        """The number of the last event that `take` returned, or that overflowed."""
        return self._sequence

    def stored(self, block_hash: bytes) -> None:
        """The block entered the prefix cache."""
        short = block_hash[:SHORT_HASH_BYTES]
        with self._lock:
            self._held.add(short)
            self._change(short, True)

    def removed(self, block_hash: bytes) -> None:
        """The block was evicted."""
        short = block_hash[:SHORT_HASH_BYTES]
        with self._lock:
            self._held.discard(short)
            self._change(short, False)

    def cleared(self) -> None:
        """The prefix cache forgot every block."""
        with self._lock:
            self._held.clear()
            self._changes.clear()
            self._cleared, self._overflowed = True, False

    def take(self) -> list[BlockEvents]:
        """The changes since the last call, for all routers. Callable from any thread, but from one only."""
        with self._lock:
            changes, self._changes = self._changes, {}
            cleared, self._cleared = self._cleared, False
            overflowed, self._overflowed = self._overflowed, False
            if overflowed:
                self._sequence += 1
                return []
            events = []
            hashes = list(changes)
            for first in range(0, len(hashes) or int(cleared), MAX_SHORT_HASHES):
                self._sequence += 1
                told = hashes[first : first + MAX_SHORT_HASHES]
                stored = b"".join(short for short in told if changes[short])
                removed = b"".join(short for short in told if not changes[short])
                events.append(
                    BlockEvents(
                        epoch=self.epoch,
                        sequence=self._sequence,
                        stored=stored,
                        removed=removed,
                        cleared=cleared and not first,
                    )
                )
            return events

    def snapshot(self) -> list[BlockSnapshot]:
        """All blocks of the prefix cache, in pieces. At least one piece. Callable from any thread."""
        with self._lock:
            hashes, sequence = b"".join(self._held), self._sequence
        size = SHORT_HASH_BYTES * MAX_SHORT_HASHES
        pieces = [hashes[first : first + size] for first in range(0, len(hashes), size)] or [b""]
        return [
            BlockSnapshot(epoch=self.epoch, sequence=sequence, piece=number, num_pieces=len(pieces), hashes=piece)
            for number, piece in enumerate(pieces)
        ]

    def _change(self, short: bytes, is_held: bool) -> None:
        if self._overflowed:
            return
        self._changes[short] = is_held
        if len(self._changes) > self._max_changes:
            self._changes.clear()
            self._cleared, self._overflowed = False, True
