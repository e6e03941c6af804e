"""Follows what workers report of their prefix caches, and notices when something was missed. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from common.wire.messages import SHORT_HASH_BYTES, BlockEvents, BlockSnapshot, WorkerHeartbeat
from router.fleet.prefix_index import PrefixIndex

ASK_AGAIN_S = 1.0
"""A snapshot that was asked for and did not come whole in this time is asked for again."""


@dataclass(slots=True)
class _Followed:
    """One life of a worker. `sequence` is that of the last event that the index has, `next_piece` of a snapshot."""

    epoch: int
    sequence: int = 0
    next_piece: int = 0
    asked_at: float | None = None


class BlockReports:
    """Keeps an index up to date. A worker begins with nothing in its cache, and with event 0.

    Events are taken in order only. After a gap the index keeps what it has until a snapshot comes.
    """

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._followed: dict[str, _Followed] = {}

    def begin(self, address: str, epoch: int) -> None:
        """A worker's life begins: its cache is empty."""
        self._index.clear(address)
        self._followed[address] = _Followed(epoch)

    def end(self, address: str) -> None:
        """The worker is gone."""
        self._index.clear(address)
        self._followed.pop(address, None)

    def on_events(self, address: str, events: BlockEvents) -> None:
        """Take the next events; those of another life, behind a gap, or taken before are left out."""
        followed = self._followed.get(address)
        if followed is None or followed.epoch != events.epoch or events.sequence != followed.sequence + 1:
            return
        followed.sequence = events.sequence
        if events.cleared:
            self._index.clear(address)
        self._index.remove(address, shorts_of(events.removed))
        self._index.store(address, shorts_of(events.stored))
        if events.below:
            self._index.store_below(address, shorts_of(events.below))

    def on_snapshot(self, address: str, snapshot: BlockSnapshot) -> None:
        """Take the next piece of a snapshot; once the last is there, events go on behind it."""
        followed = self._followed.get(address)
        if followed is None or followed.epoch != snapshot.epoch:
            return
        if snapshot.piece == 0:
            self._index.clear_stored(address)
        elif snapshot.piece != followed.next_piece:
            return  # a piece was lost: the next heartbeat shows that the index is behind
        self._index.store(address, shorts_of(snapshot.hashes))
        if snapshot.below:
            self._index.store_below(address, shorts_of(snapshot.below))
        followed.next_piece = snapshot.piece + 1
        if followed.next_piece == snapshot.num_pieces:
            followed.sequence, followed.next_piece, followed.asked_at = snapshot.sequence, 0, None

    def begin_snapshot(self, address: str, beat: WorkerHeartbeat, now: float) -> bool:
        """Begin to wait for a snapshot if the index lacks events from before this heartbeat. True: ask for it now."""
        followed = self._followed.get(address)
        if followed is None or followed.epoch != beat.epoch or followed.sequence == beat.block_sequence:
            return False
        if followed.asked_at is not None and now - followed.asked_at < ASK_AGAIN_S:
            return False
        followed.asked_at = now
        return True


def shorts_of(packed: bytes) -> list[bytes]:
    """The block hashes of a message."""
    return [packed[at : at + SHORT_HASH_BYTES] for at in range(0, len(packed), SHORT_HASH_BYTES)]
