"""Pieces of pinned memory, beside a device that copies when the test says so."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from kernels import to_device, to_host
from kernels.interface.host_copies import fill_device
from kernels.interface.pinned_memory import PinnedMemory, granted, pinned
from kernels.interface.pinned_ring import PIECE_ALIGN_BYTES, CopyLate, PinnedPiece, PinnedRing

from ...pretended_gpu import GPU, on_gpu, pretended_gpu

SIZE = 16 * PIECE_ALIGN_BYTES


class LateMark:
    """`queries_left`: it is reached when it was asked so often; below 0 never."""

    def __init__(self, queries_left: int) -> None:
        self.queries_left, self.fails = queries_left, False

    def query(self) -> bool:
        if self.fails:
            raise RuntimeError("the device failed")
        self.queries_left -= self.queries_left > 0
        return self.queries_left == 0

    def reach(self) -> None:
        self.queries_left = 0


@dataclass
class Rig:
    """A ring beside a device, which does no copy by itself unless `queries` says after how many looks."""

    queries: int = -1
    wait_s: float = 60.0
    marks: list[LateMark] = field(default_factory=list)
    allocated: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ring = PinnedRing(np.zeros(SIZE, np.uint8), self._allocate, self._mark, wait_s=self.wait_s)

    def _allocate(self, num_bytes: int) -> np.ndarray:
        self.allocated.append(num_bytes)
        return np.zeros(num_bytes, np.uint8)

    def _mark(self, device: torch.device) -> LateMark:
        self.marks.append(LateMark(self.queries))
        return self.marks[-1]

    def send(self, num_bytes: int) -> PinnedPiece:
        """A piece whose copy was launched."""
        piece = self.ring.take(num_bytes)
        self.ring.launched(piece, GPU)
        return piece

    def leave(self, num_bytes: int) -> tuple[int, int]:
        """The same, which the host has forgotten: where it lies."""
        loan = self.send(num_bytes).loan
        return loan.begin, loan.end


def units(*spans: tuple[int, int]) -> list[tuple[int, int]]:
    return [(begin * PIECE_ALIGN_BYTES, end * PIECE_ALIGN_BYTES) for begin, end in spans]


def test_pieces_follow_each_other_and_wrap_around() -> None:
    rig = Rig()
    found = [rig.leave(size * PIECE_ALIGN_BYTES) for size in (6, 5, 4)]
    assert found == units((0, 6), (6, 11), (11, 15))
    rig.marks[0].reach()
    assert rig.leave(3 * PIECE_ALIGN_BYTES) == units((0, 3))[0]  # 3 do not fit behind 15
    rig.marks[1].reach()
    assert rig.leave(8 * PIECE_ALIGN_BYTES) == units((3, 11))[0]
    rig.ring.check_integrity()
    assert not rig.allocated


def test_pieces_begin_aligned_whatever_their_size() -> None:
    rig = Rig()
    assert [rig.leave(size) for size in (1, 0, PIECE_ALIGN_BYTES + 1)] == units((0, 1), (1, 2), (2, 4))
    assert [len(rig.ring.take(size).memory) for size in (1, 0, 7)] == [1, 0, 7]


def test_a_piece_is_not_lent_again_before_its_copy_is_over() -> None:
    rig = Rig(queries=5)
    rig.leave(SIZE)
    mark = rig.marks[0]
    assert rig.leave(SIZE) == (0, SIZE), "after a wait"
    assert mark.queries_left == 0 and not rig.allocated


def test_a_copy_that_is_over_frees_nothing_before_older_ones_are() -> None:
    rig = Rig()
    half = SIZE // 2
    for _ in range(2):
        rig.leave(half)
    rig.marks[1].reach()
    first = rig.marks[0]
    first.queries_left = 3
    assert rig.leave(half) == (0, half) and first.queries_left == 0


def test_what_the_host_still_reads_is_not_lent_again() -> None:
    rig = Rig(queries=0)
    read = torch.from_numpy(rig.send(SIZE).memory)
    assert rig.ring.take(PIECE_ALIGN_BYTES).loan.own is not None, "no room, and nothing to wait for"
    view = read.view(torch.int64)[3:5]
    del read
    assert rig.ring.take(PIECE_ALIGN_BYTES).loan.own is not None
    del view
    assert rig.ring.take(PIECE_ALIGN_BYTES).loan.begin == 0 and rig.allocated == [PIECE_ALIGN_BYTES] * 2


def test_what_was_forgotten_unread_waits_for_its_copy() -> None:
    rig = Rig(queries=2)
    torch.from_numpy(rig.send(SIZE).memory)
    assert rig.leave(SIZE) == (0, SIZE) and rig.marks[0].queries_left == 0


def test_a_piece_without_a_copy_is_free_once_it_is_dropped() -> None:
    """As when writing it, or the launch of its copy, failed."""
    rig = Rig()
    piece = rig.ring.take(SIZE)
    assert rig.ring.take(8).loan.own is not None
    del piece
    assert rig.leave(SIZE) == (0, SIZE) and not rig.marks[0].query()


def test_a_piece_larger_than_the_ring_has_memory_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    for _ in range(2):
        memory = rig.send(SIZE + 1).memory
        memory[:] = 7
    assert rig.allocated == [SIZE + 1] * 2 and len(memory) == SIZE + 1
    (warning,) = caplog.records
    assert "1,025 bytes does not fit into the pinned ring of 1,024" in warning.message


def test_memory_of_its_own_stays_until_the_copy_is_over() -> None:
    rig = Rig()
    own = rig.send(2 * SIZE).loan.own
    assert own is not None
    rig.leave(8)
    assert any(loan.own is own for loan in rig.ring._own), "the device may still read it"
    rig.marks[0].reach()
    rig.leave(8)
    assert not rig.ring._own


def test_a_wait_has_a_deadline() -> None:
    rig = Rig(wait_s=0.02)
    rig.leave(SIZE)
    with pytest.raises(CopyLate, match="1,024 bytes within 0.02 s"):
        rig.ring.take(8)
    rig.marks[0].reach()
    assert rig.leave(8) == units((0, 1))[0], "it goes on"


def test_a_failed_device_is_told() -> None:
    rig = Rig()
    rig.leave(8)
    rig.marks[0].fails = True
    with pytest.raises(RuntimeError, match="the device failed"):
        rig.ring.take(8)


def test_a_ring_is_drained_before_it_goes() -> None:
    rig = Rig(queries=4)
    for size in (8, 2 * SIZE):
        rig.leave(size)
    rig.ring.drain()
    assert [mark.queries_left for mark in rig.marks] == [0, 0]


@pytest.mark.parametrize("seed", range(20))
def test_no_byte_is_lent_twice(seed: int) -> None:
    """Random sizes, holders that come and go, and a device that does copies in order, whenever it likes."""
    choose, rig = random.Random(seed), Rig(queries=3)
    held: dict[int, tuple[np.ndarray, int]] = {}
    for number in range(300):
        piece = rig.send(choose.choice((1, 60, 64, 200, 400, SIZE, SIZE + 1)))
        piece.memory[:] = number % 251
        if choose.random() < 0.4:
            held[number] = piece.memory, number % 251
        del piece
        if held and choose.random() < 0.5:
            del held[choose.choice(list(held))]
        rig.ring.check_integrity()
        assert all((memory == value).all() for memory, value in held.values())


def test_threads_share_a_ring() -> None:
    rig, problems = Rig(queries=2), []

    def work(value: int) -> None:
        for _ in range(200):
            piece = rig.ring.take(300)
            piece.memory[:] = value
            rig.ring.launched(piece, GPU)
            if not (piece.memory == value).all():
                problems.append(value)

    threads = [threading.Thread(target=work, args=(value,)) for value in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    rig.ring.check_integrity()
    assert not problems


# ------------------------------------------------------------ the memory of a process


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with pretended_gpu(monkeypatch):
        yield


@pytest.fixture
def memory(gpu: None) -> PinnedMemory:
    return pinned()


def test_pinned_memory_is_counted_while_anything_refers_to_it(memory: PinnedMemory) -> None:
    flat = torch.from_numpy(memory.allocate(3 * 1000))
    parts = [flat[begin : begin + 1000] for begin in range(0, 3000, 1000)]
    key = memory.add(5000)
    assert len(flat) == 3000 and memory.num_bytes == granted(3000) + 5000 == 4096 + 5000
    view = parts[1].numpy().data
    del flat, parts
    gc.collect()
    assert memory.num_bytes == 4096 + 5000
    memory.remove(key)
    del view
    gc.collect()
    assert memory.num_bytes == 0


@pytest.mark.parametrize(("asked", "given"), [(1, 1), (2, 2), (3, 4), (4096, 4096), (4097, 8192)])
def test_what_torch_pins(asked: int, given: int) -> None:
    assert granted(asked) == given


def test_a_larger_ring_replaces_a_smaller_one(memory: PinnedMemory) -> None:
    small = memory.ring
    memory.reserve_ring(small.num_bytes)
    assert memory.ring is small
    memory.reserve_ring(small.num_bytes + 1)
    assert memory.ring.num_bytes == 2 * small.num_bytes == memory.num_bytes - small.num_bytes
    del small
    gc.collect()
    assert memory.num_bytes == memory.ring.num_bytes


def test_copies_both_ways_pass_through_the_ring(memory: PinnedMemory) -> None:
    arrays = [np.arange(5), np.zeros((0, 3), np.float32), np.array([[1.5, 2.5]], np.float32), np.array([7], np.int32)]
    there = to_device(arrays, GPU)
    target = on_gpu(torch.full((4,), 9, dtype=torch.int32))
    fill_device(target, 3, lambda numbers: numbers.__setitem__(1, 5))
    back = [to_host(tensor) for tensor in (*there, target, on_gpu(torch.tensor(3.0)))]
    assert memory.num_bytes == memory.ring.num_bytes, "nothing beside it"
    begins = [loan.begin for loan in memory.ring._lent]
    assert len(begins) >= 3 and begins == sorted(begins)
    found = [tensor.numpy() for tensor in back]
    expected = [*arrays, np.array([0, 5, 0, 9], np.int32), np.array(3.0, np.float32)]
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape and (one == other).all()


@pytest.mark.gpu
def test_a_gpu_reads_what_was_written_though_the_host_goes_on() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    ring, arrays = pinned().ring, [np.full(ring_share(), number, np.int64) for number in range(64)]
    torch.cuda._sleep(100_000_000)  # the copies wait behind it
    there = [to_device([array], device)[0] for array in arrays]
    back = [to_host(tensor) for tensor in there[-3:]]
    torch.cuda.synchronize(device)
    ring.check_integrity()
    assert all((tensor == number).all() for number, tensor in enumerate(there))
    assert [int(tensor[0]) for tensor in back] == [61, 62, 63]


def ring_share() -> int:
    """Numbers of 8 bytes, sixteen arrays of which fill the ring."""
    return pinned().ring.num_bytes // 16 // 8
