"""Prefix index: which worker caches which KV block, from reports and expected reports. Pure.

The index is inverted: it maps a block's hash to a bit mask of workers. The hits of a prompt on all workers take one
lookup per cached block, independent of the number of workers. `BlockReports` updates the index and detects missed
reports.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile

from common.blocks import Window
from common.wire.messages import SHORT_HASH_BYTES, BlockEvents, BlockSnapshot, WorkerHeartbeat

CAPACITY, TOTAL = 131_072, 8_388_608
"""Maximum number of blocks for one worker, and for all workers together, which share it equally. A block takes about
143 bytes, 1.2 GB in total. Further reported blocks are ignored."""
EXPECTED_S = 30.0
"""Time after which an expected block that the worker has not reported is dropped, in seconds."""


@dataclass(slots=True)
class _WorkerBlocks:
    """Blocks of one worker, whose mask is `bit`.

    `expected` maps blocks to the time until which to wait, earliest first. `below` are in a tier below the prefix
    cache. Some of them may have been copied to `stored` since.
    """

    bit: int
    stored: set[bytes] = field(default_factory=set)
    below: set[bytes] = field(default_factory=set)
    expected: dict[bytes, float] = field(default_factory=dict)


class PrefixHits:
    """Number of leading blocks of one prompt that each worker does not have to compute.

    `levels` contains (number of blocks, mask of workers with at least that many): increasing numbers, shrinking masks.
    `reach` is the same including the tiers below prefix caches, None if they add nothing.
    """

    __slots__ = ("_counts", "_index", "_masks", "reach")

    def __init__(self, index: PrefixIndex, levels: Sequence[tuple[int, int]], reach: PrefixHits | None = None) -> None:
        self._index, self.reach = index, reach
        self._counts = [count for count, _ in levels]
        self._masks = [mask for _, mask in levels]

    def num_blocks(self, address: str) -> int:
        """Return the number of leading blocks in the worker's memory."""
        bit = self._index.bit_of(address)
        if not self._masks or not bit & self._masks[0]:
            return 0
        # Masks only lose bits: find the last one with this bit.
        return self._counts[bisect_left(self._masks, 1, lo=1, key=lambda mask: not mask & bit) - 1]

    def num_reachable(self, address: str) -> int:
        """Return the number of leading blocks in the worker's memory and tiers."""
        return (self.reach or self).num_blocks(address)

    @property
    def most_reachable(self) -> int:
        """Maximum number of leading blocks on any worker, in memory or tiers."""
        counts = (self.reach or self)._counts
        return counts[-1] if counts else 0

    def holders(self) -> Iterator[tuple[int, Iterator[str]]]:
        """Iterate over (number of blocks, workers with that many in memory or tiers), most blocks first."""
        most, before = self.reach or self, 0
        for count, mask in zip(reversed(most._counts), reversed(most._masks), strict=True):
            yield count, self._index.addresses(mask & ~before)
            before = mask

    def levels(self) -> Iterator[int]:
        """Iterate over the masks of workers by decreasing number of blocks, those in memory first."""
        yield from reversed(self._masks)
        if self.reach is not None:
            yield from self.reach.levels()

    def __bool__(self) -> bool:
        return bool(self._masks or self.reach)


class PrefixIndex:
    """Which worker caches which block. Bounded by `capacity` blocks per worker and `total` blocks overall."""

    def __init__(self, capacity: int = CAPACITY, expected_s: float = EXPECTED_S, total: int = TOTAL) -> None:
        self._capacity, self._expected_s, self._total = capacity, expected_s, total
        self._num_stored = 0
        self._holders: dict[bytes, int] = {}
        self._holders_below: dict[bytes, int] = {}
        self._workers: dict[str, _WorkerBlocks] = {}
        self._addresses: list[str] = []  # by bit number; "" is free

    # ------------------------------------------------------------ updates

    def expect(self, address: str, hashes: Sequence[bytes], now: float, *, capacity: int | None = None) -> None:
        """Expect the worker to report this chain soon. `capacity` is the worker's own number of blocks."""
        held, bound = self._held(address), min(self._capacity, capacity or self._capacity)
        stored, expected, holders, until = held.stored, held.expected, self._holders, now + self._expected_s
        for digest in hashes[:bound]:
            short = digest[:SHORT_HASH_BYTES]
            if short in stored:
                continue
            if expected.pop(short, None) is None:
                holders[short] = holders.get(short, 0) | held.bit
            expected[short] = until  # last, as it expires last
        if len(expected) > bound:
            self._forget_expected(held, list(islice(expected, len(expected) - bound)))

    def store(self, address: str, shorts: Sequence[bytes]) -> None:
        """Process a report of stored blocks."""
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
        for short in new:  # thousands of workers report: about 0.4 us per block
            mask = holders.get(short)
            holders[short] = bit if mask is None else mask | bit
        self._end_expectations(held, shorts)

    def store_below(self, address: str, shorts: Sequence[bytes]) -> None:
        """Process a report of blocks in a tier below the prefix cache."""
        held = self._held(address)
        room = min(self._capacity - len(held.below), self._total - self._num_stored)
        new = [short for short in shorts if short not in held.below][: max(0, room)]
        held.below.update(new)
        self._num_stored += len(new)
        for short in new:
            self._holders_below[short] = self._holders_below.get(short, 0) | held.bit

    def remove(self, address: str, shorts: Sequence[bytes]) -> None:
        """Process a report of removed blocks. They are no longer expected either."""
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
        """Drop the reported blocks of a worker that will report all of them again. Expected blocks stay."""
        held = self._held(address)
        stored, held.stored = held.stored, set()
        self._num_stored -= len(stored)
        for short in stored:
            if short not in held.expected:
                self._drop(short, held)
        self._drop_below(held, set(held.below))

    def expire(self, now: float) -> None:
        """Drop blocks that were expected for too long."""
        for held in self._workers.values():
            if held.expected and next(iter(held.expected.values())) <= now:
                due = takewhile(lambda one: one[1] <= now, held.expected.items())  # ordered by time
                self._forget_expected(held, [short for short, _ in due])

    def clear(self, address: str) -> None:
        """Drop all blocks of a worker that restarted or is gone."""
        held = self._workers.pop(address, None)
        if held is not None:
            self._num_stored -= len(held.stored)
            for short in (*held.stored, *held.expected):
                self._drop(short, held)
            self._drop_below(held, set(held.below))
            self._addresses[held.bit.bit_length() - 1] = ""

    def clear_all(self) -> None:
        """Drop all blocks of all workers."""
        self._num_stored = 0
        self._holders.clear()
        self._holders_below.clear()
        self._workers.clear()
        self._addresses.clear()

    # ------------------------------------------------------------ queries

    @property
    def is_empty(self) -> bool:
        """Whether no worker caches any block."""
        return not self._holders and not self._holders_below

    def hits(self, hashes: Sequence[bytes], window: Window | None = None) -> PrefixHits:
        """Return the number of leading blocks that each worker does not have to compute."""
        found = _window_levels(hashes, self._holders, {}, window) if window else _levels(hashes, self._holders, {})
        if not self._holders_below:
            return PrefixHits(self, found)
        tables = (self._holders, self._holders_below)
        reach = _window_levels(hashes, *tables, window) if window else _levels(hashes, *tables)
        return PrefixHits(self, found, PrefixHits(self, reach) if reach != found else None)

    def num_reported(self, address: str, hashes: Sequence[bytes]) -> int:
        """Return the number of leading blocks that the worker has reported, in memory or in a tier."""
        held = self._workers.get(address)
        if held is None:
            return 0
        for count, digest in enumerate(hashes):
            short = digest[:SHORT_HASH_BYTES]
            if short not in held.stored and short not in held.below:
                return count
        return len(hashes)

    def bit_of(self, address: str) -> int:
        """Return the mask of a worker; 0 if nothing is known of it."""
        held = self._workers.get(address)
        return held.bit if held is not None else 0

    def addresses(self, mask: int) -> Iterator[str]:
        """Iterate over the workers of a mask."""
        while mask:
            bit = mask & -mask
            mask ^= bit
            yield self._addresses[bit.bit_length() - 1]

    def size(self, address: str) -> int:
        """Return the number of blocks that the worker has or is expected to have."""
        held = self._workers.get(address)
        return len(held.stored) + len(held.expected) if held is not None else 0

    # ------------------------------------------------------------ inside

    def _drop_below(self, held: _WorkerBlocks, shorts: Iterable[bytes]) -> None:
        for short in shorts:
            held.below.discard(short)
            self._num_stored -= 1
            if mask := self._holders_below.get(short, 0) & ~held.bit:
                self._holders_below[short] = mask
            else:
                self._holders_below.pop(short, None)

    def _held(self, address: str) -> _WorkerBlocks:
        held = self._workers.get(address)
        if held is None:
            if "" in self._addresses:
                place = self._addresses.index("")
                self._addresses[place] = address
            else:
                place = len(self._addresses)
                self._addresses.append(address)
            held = self._workers[address] = _WorkerBlocks(1 << place)
        return held

    def _drop(self, short: bytes, held: _WorkerBlocks) -> None:
        mask = self._holders.get(short, 0) & ~held.bit
        if mask:
            self._holders[short] = mask
        else:
            self._holders.pop(short, None)

    def _end_expectations(self, held: _WorkerBlocks, shorts: Sequence[bytes]) -> None:
        """Remove blocks from the expected ones after a report on them."""
        for short in shorts if held.expected else ():
            if held.expected.pop(short, None) is not None and short not in held.stored:
                self._drop(short, held)

    def _forget_expected(self, held: _WorkerBlocks, shorts: Iterable[bytes]) -> None:
        for short in shorts:
            del held.expected[short]
            self._drop(short, held)


def _levels(hashes: Sequence[bytes], holders: Mapping[bytes, int], more: Mapping[bytes, int]) -> list[tuple[int, int]]:
    """Compute the levels of `PrefixHits`. A block counts if either table contains it."""
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


def _window_levels(
    hashes: Sequence[bytes], holders: Mapping[bytes, int], more: Mapping[bytes, int], window: Window
) -> list[tuple[int, int]]:
    """Compute the levels for a model with a window: a worker needs only the blocks in the window before a position.

    Only the first and the last block of the window are checked. Gaps between them are ignored.
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
"""Time after which an incomplete snapshot is requested again, in seconds."""


@dataclass(slots=True)
class _ReportState:
    """Reports of one incarnation: `sequence` of the last event in the index, and `next_piece` of a snapshot."""

    epoch: int
    sequence: int = 0
    next_piece: int = 0
    asked_at: float | None = None


class BlockReports:
    """Updates an index from workers' reports. A worker starts with an empty cache and event 0.

    Events are applied in order only. After a gap the index is unchanged until a snapshot arrives.
    """

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._states: dict[str, _ReportState] = {}

    def begin(self, address: str, epoch: int) -> None:
        """Start a worker's incarnation with an empty cache."""
        self._index.clear(address)
        self._states[address] = _ReportState(epoch)

    def end(self, address: str) -> None:
        """Remove a worker."""
        self._index.clear(address)
        self._states.pop(address, None)

    def on_events(self, address: str, events: BlockEvents) -> None:
        """Apply the next events. Ignores those of another incarnation, after a gap, or applied before."""
        state = self._states.get(address)
        if state is None or state.epoch != events.epoch or events.sequence != state.sequence + 1:
            return
        state.sequence = events.sequence
        if events.cleared:
            self._index.clear(address)
        self._index.remove(address, split_hashes(events.removed))
        self._index.store(address, split_hashes(events.stored))
        if events.below:
            self._index.store_below(address, split_hashes(events.below))

    def on_snapshot(self, address: str, snapshot: BlockSnapshot) -> None:
        """Apply the next piece of a snapshot. After the last one, events are applied again."""
        state = self._states.get(address)
        if state is None or state.epoch != snapshot.epoch:
            return
        if snapshot.piece == 0:
            self._index.clear_stored(address)
        elif snapshot.piece != state.next_piece:
            return  # a piece was lost: the next heartbeat shows that the index is out of date
        self._index.store(address, split_hashes(snapshot.hashes))
        if snapshot.below:
            self._index.store_below(address, split_hashes(snapshot.below))
        state.next_piece = snapshot.piece + 1
        if state.next_piece == snapshot.num_pieces:
            state.sequence, state.next_piece, state.asked_at = snapshot.sequence, 0, None

    def begin_snapshot(self, address: str, beat: WorkerHeartbeat, now: float) -> bool:
        """Return whether to request a snapshot now, because events before this heartbeat are missing."""
        state = self._states.get(address)
        if state is None or state.epoch != beat.epoch or state.sequence == beat.block_sequence:
            return False
        if state.asked_at is not None and now - state.asked_at < ASK_AGAIN_S:
            return False
        state.asked_at = now
        return True


def split_hashes(packed: bytes) -> list[bytes]:
    """Split the packed block hashes of a message."""
    return [packed[at : at + SHORT_HASH_BYTES] for at in range(0, len(packed), SHORT_HASH_BYTES)]
