"""Opens the tiers that a worker is configured with."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable
from pathlib import Path

from common.config import WorkerConfig
from common.engine.kv.block_pool import BlockPool
from common.engine.kv.cache import KVCache
from common.engine.kv.tiers.block_file import BlockFile, slots_within
from common.engine.kv.tiers.block_tiers import BlockTiers, ReadEnded
from common.engine.kv.tiers.copies import copied_incoming, copied_outgoing
from common.engine.kv.tiers.host_slots import HostSlotStore
from common.engine.kv.tiers.tier import BlockTier
from common.errors import ConfigError
from common.machine import write_failure

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG)
"""Errors of a full or failing disk, as opposed to an invalid path."""


class NullSlotStore:
    """Store of a tier that is disabled from the start."""

    num_slots = 0
    found: Iterable[tuple[int, int, bytes]] = ()

    def __init__(self, block_bytes: int) -> None:
        self.block_bytes = block_bytes

    def write(self, slot: int, block_hash: bytes, block: memoryview) -> None: ...

    def read(self, slot: int, block_hash: bytes, into: memoryview) -> bool:
        return False

    def clear(self) -> None: ...
    def close(self) -> None: ...


def open_tiers(
    config: WorkerConfig, kv: KVCache, fingerprint: str, pool: BlockPool, notify: Callable[[ReadEnded], None]
) -> BlockTiers | None:
    """Open the configured tiers; None if there are none. Raises ConfigError, or OSError if a path cannot be opened."""
    tiers = [_host(config, kv)] if config.kv_host_gib else []
    if config.kv_disk_gib:
        tiers.append(_disk(config, kv, fingerprint))
    return BlockTiers(tiers, pool, copied_outgoing(kv), copied_incoming(kv), notify) if tiers else None


def _host(config: WorkerConfig, kv: KVCache) -> BlockTier:
    num_slots = int(config.kv_host_gib * 2**30) // kv.wire_bytes
    if not num_slots:
        raise ConfigError("kv_host_gib", config.kv_host_gib, f"at least {kv.wire_bytes} bytes, the size of a block")
    try:
        return BlockTier("host", HostSlotStore(kv.wire_bytes, num_slots))
    except OSError as error:
        raise ConfigError("kv_host_gib", config.kv_host_gib, f"within the memory of this machine ({error})") from error


def _disk(config: WorkerConfig, kv: KVCache, fingerprint: str) -> BlockTier:
    num_slots = slots_within(int(config.kv_disk_gib * 2**30), kv.wire_bytes)
    if not num_slots:
        raise ConfigError("kv_disk_gib", config.kv_disk_gib, f"at least {kv.wire_bytes} bytes, the size of a block")
    try:
        return BlockTier("disk", BlockFile(Path(config.kv_disk_path), fingerprint, kv.wire_bytes, num_slots))
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        tier = BlockTier("disk", NullSlotStore(kv.wire_bytes))
        needed = num_slots * kv.wire_bytes
        tier.fail("written", write_failure(config.kv_disk_path, error, needed))
        return tier
