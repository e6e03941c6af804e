"""Slots in host memory: what was written comes back whole, or not at all."""

from __future__ import annotations

import pytest

from common.config import PrefillWorkerConfig
from common.engine.kv.tiers.host_slots import HostSlotStore
from common.errors import ConfigError

ONE, TWO = bytes(range(64)), bytes(64)


def read(slots: HostSlotStore, slot: int, block_hash: bytes) -> bytes | None:
    into = bytearray(64)
    return bytes(into) if slots.read(slot, block_hash, memoryview(into)) else None


def test_blocks_come_back_under_their_hash_alone() -> None:
    slots = HostSlotStore(64, 3)
    slots.write(0, b"one", memoryview(ONE))
    slots.write(2, b"two", memoryview(TWO))
    assert read(slots, 0, b"one") == ONE and read(slots, 2, b"two") == TWO
    assert read(slots, 0, b"two") is None and read(slots, 1, b"one") is None
    slots.write(0, b"two", memoryview(TWO))
    assert read(slots, 0, b"one") is None and read(slots, 0, b"two") == TWO


def test_a_damaged_block_is_none() -> None:
    slots = HostSlotStore(64, 1)
    slots.write(0, b"one", memoryview(ONE))
    slots._slots[0][17] ^= 1
    assert read(slots, 0, b"one") is None


def test_cleared_slots_hold_nothing_and_take_blocks_again() -> None:
    slots = HostSlotStore(64, 1)
    slots.write(0, b"one", memoryview(ONE))
    slots.clear()
    assert read(slots, 0, b"one") is None
    slots.write(0, b"one", memoryview(ONE))
    assert read(slots, 0, b"one") == ONE


def test_a_cpu_worker_is_told_what_to_use_instead() -> None:
    with pytest.raises(ConfigError, match="kv_host_gib.*--kv-memory-gib for a larger"):
        PrefillWorkerConfig(model="tiny-random", device="cpu", kv_host_gib=1.0)
    with pytest.raises(ConfigError, match="kv_host_gib.*0 with --no-enable-prefix-caching"):
        PrefillWorkerConfig(model="tiny-random", device="cuda", kv_host_gib=1.0, enable_prefix_caching=False)
