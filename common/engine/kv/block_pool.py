"""KV block allocation: each block is free, cached (hashed, unowned, evictable) or owned (reference-counted).

Not thread-safe: a pool belongs to one engine loop. Blocks are indices into the KV cache tensor.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from common.blocks import CachedPrefix, Window
from common.engine.kv.block_log import BlockLog
from common.errors import BlockError


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Number of blocks per state. free + cached + owned == total, always."""

    free: int
    cached: int
    owned: int

    @property
    def total(self) -> int:
        return self.free + self.cached + self.owned


class BlockPool:
    """Allocator with reference counts and an LRU prefix cache over hashed blocks.

    `allocate` prefers the most recently freed block: its memory is already mapped, while the first use of a block
    costs a page fault per 4 KiB. `on_published` is called for each block that enters the prefix cache.

    A block can be published under its hash once `wrote` has covered every slot since its allocation, that is, after
    completed steps or a verified transfer filled it. After its release, a published block stays cached until the pool
    needs it. Eviction order is least recently released first.

    `num_changes` differs whenever blocks were allocated, acquired, released or published since.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 1,
        *,
        enable_prefix_caching: bool = True,
        log: BlockLog | None = None,
    ) -> None:
        """`block_size`: slots per block, one per token. `log` records changes of the prefix cache."""
        if num_blocks < 1:
            raise BlockError(f"a pool needs at least one block, not {num_blocks}")
        self.num_blocks, self.block_size = num_blocks, block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._num_written: list[int] = [0] * num_blocks
        self._free = list(reversed(range(num_blocks)))
        self._refs: list[int] = [0] * num_blocks
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        self.log = log or BlockLog()
        self.num_changes = 0
        self.on_published: Callable[[int, bytes], None] = lambda block, block_hash: None

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can return now: free blocks and evictable cached blocks."""
        return len(self._free) + len(self._cached)

    @property
    def counts(self) -> BlockCounts:
        free, cached = len(self._free), len(self._cached)
        return BlockCounts(free, cached, self.num_blocks - free - cached)

    def allocate(self, count: int) -> list[int]:
        """Return `count` blocks with one reference each. Raises BlockError if fewer are available."""
        if count > self.num_available:
            raise BlockError(f"cannot allocate {count} blocks: {self.num_available} of {self.num_blocks} available")
        blocks = []
        self.num_changes += 1
        for _ in range(count):
            block = self._free.pop() if self._free else self._evict()
            self._refs[block], self._num_written[block] = 1, 0
            blocks.append(block)
        return blocks

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the blocks of the longest cached prefix of `hashes`. Call `acquire` on them before `allocate`."""
        blocks: list[int] = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def match_window(self, hashes: Sequence[bytes], window: Window) -> CachedPrefix:
        """Return the longest prefix of `hashes` whose blocks within the window are all cached.

        A hash covers all preceding tokens too, so blocks before the window are not checked.
        """
        if not window:
            return CachedPrefix(0, self.match(hashes))
        end = index = len(hashes)
        first = window.first_block(end * self.block_size)
        while index > first:
            index -= 1
            if hashes[index] not in self._block_of:
                end, first = index, window.first_block(index * self.block_size)
        return CachedPrefix(first, [self._block_of[block_hash] for block_hash in hashes[first:end]])

    def num_reclaimed(self, blocks: Iterable[int]) -> int:
        """Return how many of `blocks` count as available now but would not after `acquire`."""
        return sum(1 for block in blocks if self._refs[block] == 0)

    def acquire(self, blocks: Iterable[int]) -> None:
        """Add a reference to each published block (a prefix hit)."""
        self.num_changes += 1
        for block in blocks:
            if self._refs[block] == 0:
                if block not in self._cached:
                    raise BlockError(f"cannot acquire block {block}: it is free")
                del self._cached[block]
            self._refs[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each block. The last blocks of a sequence are evicted first."""
        self.num_changes += 1
        for block in reversed(blocks):
            if block < 0 or self._refs[block] < 1:
                raise BlockError(f"cannot release block {block}: it has no owner")
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if block in self._hash_of:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def wrote(self, blocks: Sequence[int], begin: int, end: int) -> None:
        """Record that the KV of tokens `begin` to `end` of the sequence that owns `blocks` has been written.

        Call it only after the step that computed them has completed, or the transfer has been verified. Raises
        BlockError if slots before `begin` were not written, because blocks are filled in order.
        """
        while begin < end:
            index, slot = divmod(begin, self.block_size)
            block, num_slots = blocks[index], min(self.block_size - slot, end - begin)
            if block < 0 or self._refs[block] < 1 or slot > self._num_written[block]:
                state = f"{self._num_written[block]} of {self.block_size} slots written, {self._refs[block]} owners"
                raise BlockError(f"block {block} was written from slot {slot} but has {state}")
            self._num_written[block] = max(self._num_written[block], slot + num_slots)
            begin += num_slots

    def publish(self, block: int, block_hash: bytes) -> None:
        """Make an owned, complete block available to later requests. A second block with the same hash stays private.

        Raises BlockError if the block has no owner or has unwritten slots.
        """
        if block < 0 or self._refs[block] < 1:
            raise BlockError(f"cannot publish block {block}: it has no owner")
        if self._num_written[block] < self.block_size:
            written = f"{self._num_written[block]} of {self.block_size} slots"
            raise BlockError(f"cannot publish block {block}: only {written} are written")
        if not self.enable_prefix_caching or block_hash in self._block_of or block in self._hash_of:
            return
        self.num_changes += 1
        self._hash_of[block] = block_hash
        self._block_of[block_hash] = block
        self.log.stored(block_hash)
        self.on_published(block, block_hash)

    def is_published(self, block: int, block_hash: bytes) -> bool:
        """Return whether the block is published under this hash. Thread-safe.

        If this is true both before and after another thread copied the block, the copy is consistent: a block must be
        evicted before it can be written again.
        """
        return self._hash_of.get(block) == block_hash

    def find(self, block_hash: bytes) -> int | None:
        """Return the block published under a hash. Thread-safe. Verify with `is_published` after reading it."""
        return self._block_of.get(block_hash)

    def reset_cache(self) -> None:
        """Drop every published block. Unowned ones become free."""
        self.num_changes += 1
        self._free.extend(self._cached)
        self._cached.clear()
        self._hash_of.clear()
        self._block_of.clear()
        self.log.cleared()

    def check_integrity(self, owners: Iterable[Sequence[int]]) -> BlockCounts:
        """Check that the blocks of `owners` are exactly the owned ones and that published blocks are complete.

        Raises BlockError with the numbers.
        """
        expected = [0] * self.num_blocks
        for blocks in owners:
            for block in blocks:
                expected[block] += 1
        wrong = [block for block in range(self.num_blocks) if expected[block] != self._refs[block]]
        if wrong:
            sample = ", ".join(f"{b}: {self._refs[b]} refs, {expected[b]} owners" for b in wrong[:8])
            raise BlockError(f"{len(wrong)} of {self.num_blocks} blocks have mismatched reference counts ({sample})")
        idle = set(self._free) | set(self._cached)
        if len(idle) != len(self._free) + len(self._cached) or any(self._refs[block] for block in idle):
            raise BlockError(f"free and cached lists overlap or contain owned blocks: {self.counts}")
        counts = self.counts
        owned = sum(1 for refs in self._refs if refs)
        if owned != counts.owned:
            raise BlockError(f"{owned} blocks have references but {counts.owned} are neither free nor cached")
        if set(self._hash_of.values()) != set(self._block_of) or not set(self._cached) <= set(self._hash_of):
            raise BlockError("the two tables of the prefix cache are inconsistent")
        if unwritten := [block for block in self._hash_of if self._num_written[block] < self.block_size]:
            raise BlockError(f"{len(unwritten)} published blocks have unwritten slots: {unwritten[:8]}")
        return counts

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        block_hash = self._hash_of.pop(block)
        del self._block_of[block_hash]
        self.log.removed(block_hash)
        return block
