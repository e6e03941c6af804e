"""Places that blocks pass through: each is free or lent to one transfer, and holds what was put there until then."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.engine.kv.block_ring import MIN_SLOTS, RING_BYTES, BlockRing, ring_for
from common.engine.kv.checksums import checksum
from common.engine.kv.copy_stream import CopyStream, RegistrationError
from common.engine.kv.shared_memory import NAME, SharedMemoryError
from common.engine.kv.staging import StagedOutgoing
from common.engine.transfer.transports.shm import PeerMemory
from common.errors import BlockError

from ....late_stream import DeviceBlocks, LateStream, reach_into, ring_over

A, B, HERE, THERE = ("a", 0), ("b", 0), "tcp://here", "tcp://there"
BLOCK_BYTES = 200


@pytest.fixture
def rows() -> np.typing.NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 255, (16, BLOCK_BYTES), np.uint8)


@pytest.fixture
def ring(rows: np.typing.NDArray[np.uint8]) -> Iterator[BlockRing]:
    ring = ring_over(rows, 4, LateStream())
    yield ring
    ring.check_integrity()
    ring.close()


def read(ring: BlockRing, place: int) -> bytes:
    memory, target = PeerMemory(ring.offer), bytearray(BLOCK_BYTES)
    assert memory.read(place, memoryview(target))
    memory.close()
    return bytes(target)


def test_a_reader_finds_what_was_put_and_its_checksum(ring: BlockRing, rows: np.typing.NDArray[np.uint8]) -> None:
    places, checksums = ring.put(A, HERE, [5, 3, 9])
    assert len(set(places)) == 3 and ring.num_free == 1
    for place, seal, block in zip(places, checksums, (5, 3, 9), strict=True):
        assert read(ring, place) == bytes(rows[block])
        assert seal == checksum(rows[block].data)


def test_no_place_is_filled_again_before_it_is_given_back(ring: BlockRing) -> None:
    places, _ = ring.put(A, HERE, range(6))
    assert sorted(places) == [0, 1, 2, 3] and ring.put(A, HERE, [9]) == ([], [])
    kept = read(ring, places[0])
    assert ring.release(A, places[1:3])
    again, _ = ring.put(B, THERE, [7, 8, 9])
    assert again == places[1:3] and read(ring, places[0]) == kept


def test_only_the_holder_gives_a_place_back_and_only_once(ring: BlockRing) -> None:
    places, _ = ring.put(A, HERE, [0, 1])
    other, _ = ring.put(B, HERE, [2])
    assert not ring.release(B, places) and not ring.release(A, [places[0], *other])
    assert not ring.release(("c", 0), places) and not ring.release(A, [99])
    assert ring.num_free == 1
    assert ring.release(A, [places[0], places[0]]) and ring.num_free == 2
    assert not ring.release(A, places[:1]) and ring.num_free == 2


def test_a_transfer_that_ends_holds_nothing(ring: BlockRing) -> None:
    ring.put(A, HERE, [0, 1])
    ring.put(B, THERE, [2])
    assert ring.holds_slots(HERE) and ring.holds_slots(THERE)
    for _ in range(2):
        ring.end(A)
    assert ring.num_free == 3 and not ring.holds_slots(HERE) and ring.holds_slots(THERE)


def test_any_thread_fills_a_ring_that_was_made_in_inference_mode(rows: np.typing.NDArray[np.uint8]) -> None:
    with torch.inference_mode():
        ring = ring_over(rows, 4, LateStream())
    with torch.inference_mode(False):
        assert ring.put(A, HERE, [1, 2])[0]
    ring.close()


def test_a_lost_place_is_found(rows: np.typing.NDArray[np.uint8]) -> None:
    ring = ring_over(rows, 4, LateStream())
    ring.put(A, HERE, [0])
    ring._free.pop()
    with pytest.raises(BlockError, match="2 free and 1 lent slots of 4"):
        ring.check_integrity()
    ring.close()


def test_the_device_reaches_the_places_until_they_are_unmapped(rows: np.typing.NDArray[np.uint8]) -> None:
    gc.collect()
    stream, files, maps = (
        LateStream(),
        len(os.listdir("/proc/self/fd")),
        Path("/proc/self/maps").read_text().count(NAME),
    )
    ring = ring_over(rows, 4, stream)
    assert list(stream.registered.values()) == [(4 * BLOCK_BYTES, False)]
    ring.close()
    gc.collect()
    assert not stream.registered and len(os.listdir("/proc/self/fd")) == files
    assert Path("/proc/self/maps").read_text().count(NAME) == maps


def test_where_there_is_no_memory_there_is_no_ring(rows: np.typing.NDArray[np.uint8]) -> None:
    with pytest.raises(SharedMemoryError, match="no memory for"):
        ring_over(rows, 2**50, LateStream())


@pytest.mark.parametrize(
    ("block_bytes", "num_blocks", "expected"),
    [(2**20, 10**6, RING_BYTES // 2**20), (2**20, 3, 3), (2**25, 10**6, MIN_SLOTS)],
)
def test_a_ring_is_neither_tiny_nor_huge(block_bytes: int, num_blocks: int, expected: int) -> None:
    blocks: Any = DeviceBlocks(np.zeros((1, block_bytes), np.uint8))
    ring = ring_for(StagedOutgoing(blocks, LateStream()), num_blocks)
    assert ring.num_slots == expected
    ring.close()


@pytest.mark.gpu
def test_a_gpu_copies_out_of_one_ring_into_another_cache() -> None:
    """Both ends of a host in one process: memory that is registered twice, read-only at the reader."""
    device = torch.device("cuda")
    source, target = (torch.randint(0, 255, (8, 3 * 2**20), dtype=torch.uint8, device=device) for _ in range(2))
    torch.cuda.synchronize()
    ring = ring_over(source, 4, CopyStream(device))
    memory = PeerMemory(ring.offer)
    try:
        reached = reach_into(target, CopyStream(device))(memory)
    except RegistrationError as error:
        pytest.skip(f"{error}: blocks pass through buffers here")
    for first in (0, 4):
        places, checksums = ring.put(A, HERE, range(first, first + 4))
        assert list(reached.copy((place, first + k) for k, place in enumerate(places))) == checksums
        assert ring.release(A, places)
    assert torch.equal(source, target)
    reached.close()
    memory.close()
    ring.close()
