"""Prefix index: which worker holds which KV block, from workers' reports and from what they will report soon. Pure.

The index is inverted: a block's hash leads to the workers that hold it, as the bits of a number. The hits of a prompt
on all workers take one look-up for each block that some worker holds, however many workers there are.
`BlockReports` keeps it up to date, and notices when a report was missed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile

from common.blocks import Window
from common.wire.messages import SHORT_HASH_BYTES, BlockEvents, BlockSnapshot, WorkerHeartbeat

CAPACITY, TOTAL = 131_072, 8_388_608
"""Blocks that are kept for one worker, and for all of them, each with an equal share: about 143 bytes a block, 1.2 GB
in all. What a worker reports beyond is not seen."""
EXPECTED_S = 30.0
"""A block that a worker is expected to have, and that it does not report in this time, is not expected any more."""


@dataclass(slots=True)
class _Holdings:
    """What one worker holds. `bit` stands for the worker. `expected` says until when, the earliest first.

    `below` are in a tier; some of them may have come to `stored` since.
    """

    bit: int
    stored: set[bytes] = field(default_factory=set)
    below: set[bytes] = field(default_factory=set)
    expected: dict[bytes, float] = field(default_factory=dict)


class PrefixHits:
    """How many leading blocks of one prompt each worker holds, or can go on behind.

    `levels` are (number of blocks, workers that hold at least so many), with ever more blocks and ever fewer workers.
    `reach` is the same with the tiers below prefix caches, None if they have nothing to add.
    """

    __slots__ = ("_counts", "_index", "_masks", "reach")

    def __init__(self, index: PrefixIndex, levels: Sequence[tuple[int, int]], reach: PrefixHits | None = None) -> None:
        self._index, self.reach = index, reach
        self._counts = [count for count, _ in levels]
        self._masks = [mask for _, mask in levels]

    def num_blocks(self, address: str) -> int:
        """The leading blocks that the worker holds."""
        bit = self._index.bit_of(address)
        if not self._masks or not bit & self._masks[0]:
            return 0
        # The masks only lose bits: find the last one with this bit.
        return self._counts[bisect_left(self._masks, 1, lo=1, key=lambda mask: not mask & bit) - 1]

    def num_reachable(self, address: str) -> int:
        """The same, with those in its tiers."""
        return (self.reach or self).num_blocks(address)

    @property
    def most_reachable(self) -> int:
        """The most leading blocks that any worker holds, in memory or in a tier."""
        counts = (self.reach or self)._counts
        return counts[-1] if counts else 0

    def holders(self) -> Iterator[tuple[int, Iterator[str]]]:
        """(number of blocks, workers that hold so many, in memory or in a tier), those with the most first."""
        most, before = self.reach or self, 0
        for count, mask in zip(reversed(most._counts), reversed(most._masks), strict=True):
            yield count, self._index.addresses(mask & ~before)
            before = mask

    def levels(self) -> Iterator[int]:
        """Masks of the workers that hold the most blocks, then of those that hold as many as the next, and so on.

        Those that hold them in memory come first.
        """
        yield from reversed(self._masks)
        if self.reach is not None:
            yield from self.reach.levels()

    def __bool__(self) -> bool:
        return bool(self._masks or self.reach)


class PrefixIndex:
    """Bounded: `capacity` blocks a worker, and `total` in all. Pure: `now` comes in."""

    def __init__(self, capacity: int = CAPACITY, expected_s: float = EXPECTED_S, total: int = TOTAL) -> None:
        self._capacity, self._expected_s, self._total = capacity, expected_s, total
        self._num_stored = 0
        self._holders: dict[bytes, int] = {}
        self._holders_below: dict[bytes, int] = {}
        self._workers: dict[str, _Holdings] = {}
        self._addresses: list[str] = []  # by the place of a worker's bit; "" is free

    # ------------------------------------------------------------ what workers hold

    def expect(self, address: str, hashes: Sequence[bytes], now: float, *, capacity: int | None = None) -> None:
        """The worker will report this chain soon. `capacity` is the worker's own number of blocks."""
        held, bound = self._held(address), min(self._capacity, capacity or self._capacity)
        stored, expected, holders, until = held.stored, held.expected, self._holders, now + self._expected_s
        for digest in hashes[:bound]:
            short = digest[:SHORT_HASH_BYTES]
            if short in stored:
                continue
            if expected.pop(short, None) is None:
                holders[short] = holders.get(short, 0) | held.bit
            expected[short] = until  # behind those that are expected to come sooner
        if len(expected) > bound:
            self._forget_expected(held, list(islice(expected, len(expected) - bound)))

    def store(self, address: str, shorts: Sequence[bytes]) -> None:
        """The worker reports that it holds these blocks."""
        held = self._held(address)
        new = set(shorts)
        new -= held.stored
        num_more = min(self._capacity, self._total // len(self._workers)) - len(held.stored)
        num_more = min(num_more, self._total - self._num_stored)
        if len(new) > num_more:
            new = set(islice((short for short in shorts if short in new), max(0, num_more)))
        held.stored |= new
        self._num_stored += len(new)
        holders, bit = self._holders, held.bit
        for short in new:  # thousands of workers report here: about 0.4 us each
            mask = holders.get(short)
            holders[short] = bit if mask is None else mask | bit
        self._end_expectations(held, shorts)

    def store_below(self, address: str, shorts: Sequence[bytes]) -> None:
        """The worker reports that it holds these blocks in a tier below its prefix cache."""
        held = self._held(address)
        room = min(self._capacity - len(held.below), self._total - self._num_stored)
        new = [short for short in shorts if short not in held.below][: max(0, room)]
        held.below.update(new)
        self._num_stored += len(new)
        for short in new:
            self._holders_below[short] = self._holders_below.get(short, 0) | held.bit

    def remove(self, address: str, shorts: Sequence[bytes]) -> None:
        """The worker reports that it holds these blocks no longer, which ends every expectation of them."""
        held = self._held(address)
        gone = held.stored.intersection(shorts)
        held.stored -= gone
        self._num_stored -= len(gone)
        for short in gone:
            self._drop(short, held)
        if held.below:
            self._drop_below(held, held.below.intersection(shorts))
        self._end_expectations(held, shorts)

    def clear_stored(self, address: str) -> None:
        """Forget what the worker reported: it will report all again. Expected blocks stay."""
        held = self._held(address)
        stored, held.stored = held.stored, set()
        self._num_stored -= len(stored)
        for short in stored:
            if short not in held.expected:
                self._drop(short, held)
        self._drop_below(held, set(held.below))

    def expire(self, now: float) -> None:
        """Forget blocks that were expected for too long."""
        for held in self._workers.values():
            if held.expected and next(iter(held.expected.values())) <= now:
                due = takewhile(lambda one: one[1] <= now, held.expected.items())  # the others come behind them
                self._forget_expected(held, [short for short, _ in due])

    def clear(self, address: str) -> None:
        """The worker restarted or is gone: it holds nothing."""
        held = self._workers.pop(address, None)
        if held is not None:
            self._num_stored -= len(held.stored)
            for short in (*held.stored, *held.expected):
                self._drop(short, held)
            self._drop_below(held, set(held.below))
            self._addresses[held.bit.bit_length() - 1] = ""

    def clear_all(self) -> None:
        """No worker holds anything."""
        self._num_stored = 0
        self._holders.clear()
        self._holders_below.clear()
        self._workers.clear()
        self._addresses.clear()

    # ------------------------------------------------------------ what the router asks

    @property
    def is_empty(self) -> bool:
        """Whether no worker holds any block."""
        return not self._holders and not self._holders_below

    def hits(self, hashes: Sequence[bytes], window: Window | None = None) -> PrefixHits:
        """How many leading blocks of the chain each worker need not compute: it holds them, or those in its window."""
        found = _levels_behind(hashes, self._holders, {}, window) if window else _levels(hashes, self._holders, {})
        if not self._holders_below:
            return PrefixHits(self, found)
        tables = (self._holders, self._holders_below)
        reach = _levels_behind(hashes, *tables, window) if window else _levels(hashes, *tables)
        return PrefixHits(self, found, PrefixHits(self, reach) if reach != found else None)

    def num_reported(self, address: str, hashes: Sequence[bytes]) -> int:
        """The leading blocks of the chain that the worker itself says it holds, in memory or in a tier."""
        held = self._workers.get(address)
        if held is None:
            return 0
        for count, digest in enumerate(hashes):
            short = digest[:SHORT_HASH_BYTES]
            if short not in held.stored and short not in held.below:
                return count
        return len(hashes)

    def bit_of(self, address: str) -> int:
        """What stands for the worker in masks; 0 for one of which nothing is known."""
        held = self._workers.get(address)
        return held.bit if held is not None else 0

    def addresses(self, mask: int) -> Iterator[str]:
        """The workers of a mask."""
        while mask:
            bit = mask & -mask
            mask ^= bit
            yield self._addresses[bit.bit_length() - 1]

    def size(self, address: str) -> int:
        """Blocks that the worker holds or is expected to."""
        held = self._workers.get(address)
        return len(held.stored) + len(held.expected) if held is not None else 0

    # ------------------------------------------------------------ inside

    def _drop_below(self, held: _Holdings, shorts: Iterable[bytes]) -> None:
        for short in shorts:
            held.below.discard(short)
            self._num_stored -= 1
            if mask := self._holders_below.get(short, 0) & ~held.bit:
                self._holders_below[short] = mask
            else:
                self._holders_below.pop(short, None)

    def _held(self, address: str) -> _Holdings:
        held = self._workers.get(address)
        if held is None:
            if "" in self._addresses:
                place = self._addresses.index("")
                self._addresses[place] = address
            else:
                place = len(self._addresses)
                self._addresses.append(address)
            held = self._workers[address] = _Holdings(1 << place)
        return held

    def _drop(self, short: bytes, held: _Holdings) -> None:
        mask = self._holders.get(short, 0) & ~held.bit
        if mask:
            self._holders[short] = mask
        else:
            self._holders.pop(short, None)

    def _end_expectations(self, held: _Holdings, shorts: Sequence[bytes]) -> None:
        """The worker has reported of these blocks."""
        for short in shorts if held.expected else ():
            if held.expected.pop(short, None) is not None and short not in held.stored:
                self._drop(short, held)

    def _forget_expected(self, held: _Holdings, shorts: Iterable[bytes]) -> None:
        for short in shorts:
            del held.expected[short]
            self._drop(short, held)


def _levels(hashes: Sequence[bytes], holders: Mapping[bytes, int], more: Mapping[bytes, int]) -> list[tuple[int, int]]:
    """The levels of `PrefixHits`, where either table has the workers that hold a block of the chain."""
    levels, mask = [], -1
    for count, digest in enumerate(hashes):
        short = digest[:SHORT_HASH_BYTES]
        still = mask & (holders.get(short, 0) | more.get(short, 0) if more else holders.get(short, 0))
        if still != mask:
            if count:
                levels.append((count, mask))
            mask = still
            if not mask:
                return levels
    if hashes:
        levels.append((len(hashes), mask))
    return levels


def _levels_behind(
    hashes: Sequence[bytes], holders: Mapping[bytes, int], more: Mapping[bytes, int], window: Window
) -> list[tuple[int, int]]:
    """The same where a worker goes on behind a block as soon as it holds those in the window.

    Only the first and the last of these are looked up: workers without one between them count too.
    """
    held = [holders.get(short, 0) | more.get(short, 0) for short in (digest[:SHORT_HASH_BYTES] for digest in hashes)]
    levels, mask = [], 0
    for count in range(len(held), 0, -1):
        first = min(count - 1, window.first_block(count * window.block_size))
        if (found := held[count - 1] & held[first]) & ~mask:
            mask |= found
            levels.append((count, mask))
    return levels[::-1]


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
