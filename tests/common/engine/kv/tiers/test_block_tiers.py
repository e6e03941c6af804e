"""Blocks on their way to tiers and back, on the tiers' own threads."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from common.engine.kv.block_pool import BlockPool
from common.engine.kv.tiers import block_tiers
from common.engine.kv.tiers.block_read import BlockRead
from common.engine.kv.tiers.block_tiers import BlockTiers, ReadEnded
from common.engine.kv.tiers.host_slots import HostSlotStore
from common.engine.kv.tiers.tier import BlockTier
from common.wire.messages import SHORT_HASH_BYTES

from .....waiting import wait_until

BLOCK_BYTES = 32


def digest(number: int) -> bytes:
    return number.to_bytes(16, "little")  # routers get the first bytes


class Memory:
    """The blocks of a pool, each full of one number. `during_copy` is called on the writing thread."""

    def __init__(self) -> None:
        self.blocks = np.zeros((8, BLOCK_BYTES), np.uint8)
        self.buffer = np.zeros(BLOCK_BYTES, np.uint8)
        self.during_copy: Callable[[], None] = lambda: None

    def view(self, index: int) -> memoryview:
        copied = self.blocks[index].copy()
        self.during_copy()
        return copied.data


class Buffer:
    def __init__(self, memory: Memory) -> None:
        self._memory, self._buffer = memory, bytearray(BLOCK_BYTES)

    def num_bytes(self, index: int) -> int:
        return BLOCK_BYTES

    def view(self, index: int) -> memoryview:
        return memoryview(self._buffer)

    def commit(self, indices: Sequence[int]) -> None:
        self._memory.blocks[indices[0]] = np.frombuffer(self._buffer, np.uint8)


class Slots(HostSlotStore):
    """Slots whose next writes or reads may fail, or wait for `gate`."""

    def __init__(self, num_slots: int) -> None:
        super().__init__(BLOCK_BYTES, num_slots)
        self.error: OSError | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.num_writes = self.num_reads = self.num_clears = self.num_closed = 0

    def close(self) -> None:
        self.num_closed += 1

    def clear(self) -> None:
        self.num_clears += 1
        super().clear()

    def write(self, slot: int, block_hash: bytes, block: memoryview) -> None:
        self.num_writes += 1
        self._meet()
        super().write(slot, block_hash, block)

    def read(self, slot: int, block_hash: bytes, into: memoryview) -> bool:
        self.num_reads += 1
        self._meet()
        return super().read(slot, block_hash, into)

    def _meet(self) -> None:
        self.gate.wait()
        if self.error is not None:
            raise self.error


class Rig:
    def __init__(self, *slots: Slots) -> None:
        self.memory, self.pool = Memory(), BlockPool(8)
        self.slots = slots
        self.ended: list[ReadEnded] = []
        self.changes: list[tuple[bytes, bool]] = []
        tiers = [BlockTier(name, store) for name, store in zip(("disk", "slower"), slots, strict=False)]
        self.tiers = BlockTiers(tiers, self.pool, self.memory, Buffer(self.memory), self.ended.append)
        for tier in tiers:
            tier.on_change = lambda block_hash, held: self.changes.append((block_hash, held))
        self.tiers.start()

    def publish(self, *numbers: int) -> list[int]:
        blocks = self.pool.allocate(len(numbers))
        self.pool.wrote(blocks, 0, len(blocks))
        for block, number in zip(blocks, numbers, strict=True):
            self.memory.blocks[block] = number
            self.pool.publish(block, digest(number))
        self.pool.release(blocks)
        return blocks

    def read(self, *numbers: int) -> BlockRead:
        blocks = self.pool.allocate(len(numbers))
        self.memory.blocks[blocks] = 0
        read = BlockRead("a", 0, [digest(number) for number in numbers], blocks, time.monotonic() + 60)
        self.tiers.read(read)
        return read

    def content(self, read: BlockRead) -> list[int]:
        return [int(self.memory.blocks[block][0]) for block in read.blocks]

    def held(self, *numbers: int) -> bool:
        return self.tiers.num_held([digest(number) for number in numbers]) == len(numbers)


@pytest.fixture
def make_rig() -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def make(*slots: Slots) -> Rig:
        rigs.append(Rig(*slots))
        return rigs[-1]

    yield make
    for rig in rigs:
        for slots in rig.slots:
            slots.gate.set()
        rig.tiers.close()


def test_published_blocks_come_back_after_they_were_evicted(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(Slots(4))
    rig.publish(1, 2, 3)
    wait_until(lambda: rig.held(1, 2, 3))
    rig.publish(*range(10, 18))  # evicts all
    assert rig.pool.match([digest(1)]) == []
    wait_until(lambda: rig.held(17))
    rig.tiers.touch([digest(14)])
    rig.publish(20)
    wait_until(lambda: rig.held(20))
    assert rig.held(14) and not rig.held(15)
    read = rig.read(16, 17, 20)
    wait_until(lambda: rig.ended)
    assert (read.ended, read.num_done, read.by_tier, rig.content(read)) == (True, 3, {"disk": 3}, [16, 17, 20])
    assert rig.tiers.tiers[0].link.num_transfers == 1
    assert (digest(1), True) in rig.changes and (digest(1), False) in rig.changes


def test_a_block_that_is_written_to_while_it_is_copied_is_not_kept(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(Slots(16))
    begun, go_on = threading.Event(), threading.Event()
    rig.memory.during_copy = lambda: (begun.set(), go_on.wait())[0]
    rig.publish(1)
    assert begun.wait(60)
    rig.publish(*range(10, 18))  # takes its block
    go_on.set()
    wait_until(lambda: rig.held(*range(10, 18)))
    assert not rig.held(1) and rig.tiers.num_lost == 1


def test_a_read_ends_at_the_first_block_that_no_tier_holds(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(Slots(4), Slots(4))
    rig.publish(1, 2)
    wait_until(lambda: rig.held(1, 2) and all(len(tier.hashes()) == 2 for tier in rig.tiers.tiers))
    rig.slots[0]._held.clear()  # what the faster tier says it has is damaged
    read = rig.read(1, 2, 3)
    wait_until(lambda: rig.ended)
    assert (read.num_done, read.by_tier, rig.content(read)) == (2, {"slower": 2}, [1, 2, 0])
    assert [tier.counts(0).num_corrupt for tier in rig.tiers.tiers] == [2, 0]


def test_nothing_is_written_to_blocks_that_were_taken_back(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(Slots(4))
    rig.publish(1, 2)
    wait_until(lambda: rig.held(1, 2))
    rig.slots[0].gate.clear()
    read = rig.read(1, 2)
    wait_until(lambda: rig.slots[0].num_reads)
    read.cancel()
    rig.slots[0].gate.set()
    wait_until(lambda: rig.ended)
    assert (read.num_done, rig.content(read)) == (0, [0, 0])
    assert rig.tiers.num_unread_blocks == 0


def test_a_full_disk_turns_the_tier_off_and_says_so_once(
    make_rig: Callable[..., Rig], caplog: pytest.LogCaptureFixture
) -> None:
    rig = make_rig(Slots(4))
    rig.publish(1)
    wait_until(lambda: rig.held(1))
    rig.slots[0].error = OSError(errno.ENOSPC, "No space left on device")
    rig.publish(2, 3)
    wait_until(lambda: not rig.tiers.tiers[0].is_on)
    rig.publish(4)
    assert not rig.held(1)
    read = rig.read(1)
    wait_until(lambda: rig.ended)
    assert read.num_done == 0
    assert [line.count("No space left") for line in caplog.messages] == [1]
    assert not rig.tiers.counts[0].is_on and rig.changes[-1] == (digest(1), False)
    wait_until(lambda: rig.slots[0].num_clears)  # otherwise the disk would stay full, also for the next worker


def test_a_reset_forgets_also_what_is_being_written(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(Slots(4))
    rig.publish(1)
    wait_until(lambda: rig.held(1))
    rig.slots[0].gate.clear()
    rig.publish(2, 3)
    wait_until(lambda: len(rig.tiers._offered) == 1)
    rig.pool.reset_cache()
    rig.tiers.reset()
    rig.slots[0].gate.set()
    rig.publish(4)
    wait_until(lambda: rig.held(4))
    assert rig.tiers.tiers[0].hashes() == [digest(4)]


@pytest.mark.parametrize("loss", ["reset", "failure"])
def test_routers_hear_that_a_tier_has_lost_its_blocks(make_rig: Callable[..., Rig], loss: str) -> None:
    rig = make_rig(Slots(4))
    (tier,) = rig.tiers.tiers
    tier.on_change = rig.tiers._changed
    rig.publish(1, 2)
    wait_until(lambda: rig.held(1, 2))
    rig.pool.reset_cache()
    assert [len(piece.below) for piece in rig.pool.log.snapshot()] == [2 * SHORT_HASH_BYTES]
    if loss == "reset":
        rig.tiers.reset()
    else:
        tier.fail("written", "No space left on device")
    assert [piece.below for piece in rig.pool.log.snapshot()] == [b""]
    assert b"".join(event.below for event in rig.pool.log.take()) == b""


def test_a_reset_just_before_the_end_clears_the_store(make_rig: Callable[..., Rig]) -> None:
    """The next worker finds what is left in a file."""
    slots = Slots(4)
    rig = make_rig(slots)
    slots.gate.clear()
    rig.publish(1)
    wait_until(lambda: slots.num_writes)
    rig.pool.reset_cache()
    rig.tiers.reset()
    closing = threading.Thread(target=rig.tiers.close)
    closing.start()
    wait_until(lambda: rig.tiers._stopping)
    slots.gate.set()
    closing.join()
    assert slots.num_clears == slots.num_closed == 1


def test_tiers_are_closed_when_a_slow_write_ends(make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    """The next role of the worker opens the same file."""
    monkeypatch.setattr(block_tiers, "STOP_S", 0.01)
    slots = Slots(4)
    rig = make_rig(slots)
    slots.gate.clear()
    rig.publish(1)
    wait_until(lambda: slots.num_writes)
    rig.tiers.close()
    assert slots.num_closed == 0
    slots.gate.set()
    wait_until(lambda: slots.num_closed)
    assert slots.num_closed == 1
