"""The tiers that a worker's settings ask for, opened."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from common.config import WorkerConfig
from common.errors import ConfigError
from common.kv.block_pool import BlockPool
from common.kv.cache import KVCache
from common.tiers.block_file import GIB, BlockFile, slots_within
from common.tiers.block_tiers import BlockTiers, ReadEnded
from common.tiers.copies import copied_incoming, copied_outgoing
from common.tiers.tier import BlockTier


def open_tiers(
    config: WorkerConfig, kv: KVCache, fingerprint: str, pool: BlockPool, notify: Callable[[ReadEnded], None]
) -> BlockTiers | None:
    """None if the settings ask for none. Raises ConfigError, or OSError for a file that cannot be opened."""
    tiers = []
    if config.kv_disk_gib:
        tiers.append(BlockTier("disk", _disk(config, kv, fingerprint)))
    if not tiers:
        return None
    return BlockTiers(tiers, pool, copied_outgoing(kv), copied_incoming(kv), kv.block_bytes, notify)


def _disk(config: WorkerConfig, kv: KVCache, fingerprint: str) -> BlockFile:
    num_slots = slots_within(int(config.kv_disk_gib * GIB), kv.block_bytes)
    if not num_slots:
        raise ConfigError("kv_disk_gib", config.kv_disk_gib, f"room for a block of {kv.block_bytes} bytes at least")
    return BlockFile(Path(config.kv_disk_path), fingerprint, kv.block_bytes, num_slots)
