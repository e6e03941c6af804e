"""A tier on disk under a test's engine, whose reads the test may hold up."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from common.kv.block_pool import BlockPool
from common.kv.cache import KVCache
from common.tiers.block_file import BlockFile
from common.tiers.block_tiers import BlockTiers
from common.tiers.copies import copied_incoming, copied_outgoing
from common.tiers.host_slots import HostSlots
from common.tiers.tier import BlockTier

NUM_SLOTS = 64


class SlowFile(BlockFile):
    """Reads wait for `gate`."""

    def __init__(self, path: Path, block_bytes: int) -> None:
        super().__init__(path, "layout", block_bytes, NUM_SLOTS)
        self.gate = threading.Event()
        self.gate.set()
        self.num_reads = 0

    def read(self, slot: int, block_hash: bytes, into: memoryview) -> bool:
        self.num_reads += 1
        self.gate.wait()
        return super().read(slot, block_hash, into)


class DiskTier(BlockTiers):
    """One tier in a file at `path`, started; above it one of `num_host` slots in host memory, if any."""

    def __init__(
        self, path: Path, kv: KVCache, pool: BlockPool, notify: Callable[[object], None], num_host: int = 0
    ) -> None:
        self.file = SlowFile(path, kv.block_bytes)
        tiers = [BlockTier("host", HostSlots(kv.block_bytes, num_host))] if num_host else []
        tiers.append(BlockTier("disk", self.file))
        super().__init__(tiers, pool, copied_outgoing(kv), copied_incoming(kv), notify)
        self.start()
