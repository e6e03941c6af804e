"""Copies each published block to tiers and reads blocks back, on two threads.

    pool publishes ─> offered ─> writer thread ─> every tier
    prompt is admitted ─> read ─> reader thread ─> the request's blocks ─> ReadEnded ─> engine

Blocks are written when they are published rather than when they are evicted: an eviction would delay the step that
needs the memory, and blocks only in memory are lost when a worker dies. The writer thread copies a block without
locking. If the pool still has the block under its hash after the copy, the copy is consistent (a sequence lock whose
counter is the pool's table). If the queue is full, the oldest blocks are not written.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common.engine.kv.block_pool import BlockPool
from common.engine.kv.staging import IncomingBlocks, OutgoingBlocks
from common.engine.kv.tiers.block_read import BlockRead
from common.engine.kv.tiers.counts import TierCounts
from common.engine.kv.tiers.tier import BlockTier, num_leading
from common.latency import LinkModel

log = logging.getLogger(__name__)
MOST_OFFERED = 65_536
"""Maximum number of blocks queued for writing. The queue holds indices, not copies."""
STOP_S = 2.0
"""Timeout, in seconds, for each thread at shutdown. Unwritten blocks are only copies."""


@dataclass(frozen=True, slots=True)
class ReadEnded:
    """Notifies the engine that the reader thread has finished this read."""

    read: BlockRead


class BlockTiers:
    """`tiers` are ordered from fastest to slowest. Use from the engine thread, unless documented otherwise."""

    def __init__(
        self,
        tiers: Sequence[BlockTier],
        pool: BlockPool,
        outgoing: OutgoingBlocks,
        incoming: IncomingBlocks,
        notify: Callable[[ReadEnded], None],
    ) -> None:
        """Registers as a listener for blocks published by `pool`. Calls `notify` on the reader thread per read."""
        self.tiers, self._pool, self._notify = tiers, pool, notify
        self._outgoing, self._incoming = outgoing, incoming
        self._wake = threading.Condition()
        self._offered: deque[tuple[int, bytes]] = deque(maxlen=MOST_OFFERED)
        self._reads: deque[BlockRead] = deque()  # at most one per running request
        self._to_clear = self._stopping = False
        self._num_running = 0  # threads
        self.num_unread_blocks = 0
        self.num_lost = 0
        self._threads = [
            threading.Thread(target=self._main, args=(turn,), name=f"kv-tier-{name}", daemon=True)
            for name, turn in (("write", self._write_turn), ("read", self._read_turn))
        ]
        pool.on_published = self.offer
        for tier in tiers:
            tier.on_change = self._changed
            for block_hash in tier.hashes():
                pool.log.in_tier(block_hash, True)

    def start(self) -> None:
        self._num_running = len(self._threads)
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop the threads. The last one closes the tiers, possibly after this returned. Callable from any thread."""
        with self._wake:
            self._stopping = True
            has_ended = not self._num_running
            self._wake.notify_all()
        if has_ended:
            self._close_tiers()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(STOP_S)

    @property
    def counts(self) -> Sequence[TierCounts]:
        """For metrics."""
        return [tier.counts(self.num_lost) for tier in self.tiers]

    # ------------------------------------------------------------ engine thread

    def offer(self, block: int, block_hash: bytes) -> None:
        """Queue a published block for writing."""
        if all(tier.holds(block_hash) or not tier.is_on for tier in self.tiers):
            return
        with self._wake:
            self.num_lost += len(self._offered) == MOST_OFFERED
            self._offered.append((block, block_hash))
            self._wake.notify_all()

    def num_held(self, hashes: Sequence[bytes]) -> int:
        """Return how many of the chain's leading blocks can be read."""
        return num_leading(self.tiers, hashes)

    def touch(self, hashes: Sequence[bytes]) -> None:
        """Mark blocks as recently used although they were not read from a tier."""
        for tier in self.tiers:
            tier.touch(hashes)

    def seconds(self, hashes: Sequence[bytes]) -> float:
        """Estimate the time to read these blocks, including reads already queued."""
        num_blocks, total_s = len(hashes) + self.num_unread_blocks, 0.0
        for tier in self.tiers:
            num_here = num_blocks if tier is self.tiers[-1] else sum(tier.holds(block_hash) for block_hash in hashes)
            total_s += tier.link.seconds(min(num_here, num_blocks))
            num_blocks -= min(num_here, num_blocks)
        return total_s

    def read(self, read: BlockRead) -> None:
        """Start a read. The reader thread may write to the blocks until `ReadEnded` or until `read.cancel` returned."""
        with self._wake:
            self._reads.append(read)
            self.num_unread_blocks += len(read.hashes)
            self._wake.notify_all()

    def reset(self) -> None:
        """Drop every block."""
        with self._wake:
            self._offered.clear()
            for tier in self.tiers:
                tier.reset()
            self._to_clear = True
            self._wake.notify_all()

    def copy_of(self, block_hash: bytes) -> memoryview | None:
        """Return a copy of a block for another worker, or None if no tier has it intact. Thread-safe."""
        for tier in self.tiers:
            if tier.holds(block_hash):
                copy = memoryview(bytearray(tier.block_bytes))
                if tier.read(block_hash, copy):
                    return copy
        return None

    @property
    def link(self) -> LinkModel:
        """Read time of the slowest tier, which has most of the blocks."""
        return self.tiers[-1].link if self.tiers[-1].is_on else LinkModel()

    # ------------------------------------------------------------ writer and reader threads

    def _changed(self, block_hash: bytes, present: bool) -> None:
        self._pool.log.in_tier(block_hash, present or any(tier.holds(block_hash) for tier in self.tiers))

    def _main(self, turn: Callable[[], bool]) -> None:
        try:
            while turn():
                pass
        except Exception as error:  # the worker continues without tiers, whatever the error
            log.exception("KV tiers: thread %s died", threading.current_thread().name)
            for tier in self.tiers:
                tier.fail("written or read", error)
        finally:
            with self._wake:
                self._num_running -= 1
                is_last = self._stopping and not self._num_running
            if is_last:
                self._close_tiers()

    def _close_tiers(self) -> None:
        for tier in self.tiers:
            tier.close()

    def _write_turn(self) -> bool:
        with self._wake:
            self._wake.wait_for(lambda: self._stopping or self._to_clear or self._offered)
            if self._stopping and not self._to_clear:  # a store that outlives this process must be cleared
                return False
            to_clear, self._to_clear = self._to_clear, False
            offered = None if to_clear else self._offered.popleft()
            lives = [tier.life for tier in self.tiers]
        if offered is None:
            for tier in self.tiers:
                tier.clear_store()
        else:
            self._write(*offered, lives)
        return True

    def _write(self, block: int, block_hash: bytes, lives: Sequence[int]) -> None:
        if not self._pool.is_published(block, block_hash):
            self.num_lost += 1
            return
        view = self._outgoing.view(block)
        if not self._pool.is_published(block, block_hash):  # the block may have been overwritten during the copy
            self.num_lost += 1
            return
        for tier, life in zip(self.tiers, lives, strict=True):
            tier.write(block_hash, view, life)

    def _read_turn(self) -> bool:
        with self._wake:
            self._wake.wait_for(lambda: self._stopping or self._reads)
            if self._stopping:
                return False
            read = self._reads.popleft()
        try:
            self._read(read)
        finally:
            with self._wake:
                self.num_unread_blocks -= len(read.hashes)
            read.ended = True
            self._notify(ReadEnded(read))
        return True

    def _read(self, read: BlockRead) -> None:
        began, num_read, last = time.monotonic(), 0, self.tiers[0]
        for block, block_hash in zip(read.blocks, read.hashes, strict=True):
            if read.cancelled or self._stopping or (found := self._read_one(read, block, block_hash)) is None:
                break
            if found is not last:
                self._observe(last, num_read, began)
                began, num_read, last = time.monotonic(), 0, found
            num_read += 1
        self._observe(last, num_read, began)

    def _read_one(self, read: BlockRead, block: int, block_hash: bytes) -> BlockTier | None:
        """Read one block and return its tier; None if it is missing or the read was cancelled."""
        for tier in self.tiers:
            if tier.read(block_hash, self._incoming.view(block)):
                return tier if read.commit(tier.name, lambda: self._incoming.commit([block])) else None
        return None

    def _observe(self, tier: BlockTier, num_blocks: int, began: float) -> None:
        if num_blocks:
            tier.observe(num_blocks, time.monotonic() - began)
