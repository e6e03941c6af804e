from __future__ import annotations

import gc
from pathlib import Path

import pytest

from kernels.cpu import large_pages
from kernels.cpu.large_pages import CHUNK, LARGE_PAGE, LINE, Arena

MAPS = Path("/proc/self/maps")


def test_pieces_are_zero_aligned_and_apart() -> None:
    arena = Arena()
    pieces = [arena.take(size) for size in (1, 100, 64, 4096, 7)]
    for i, piece in enumerate(pieces):
        assert piece.data_ptr() % LINE == 0
        assert not piece.any()
        piece.fill_(i + 1)
    assert [int(piece.min()) for piece in pieces] == [int(piece.max()) for piece in pieces] == [1, 2, 3, 4, 5]
    assert pieces[1].data_ptr() - pieces[0].data_ptr() == LINE


def test_what_does_not_fit_begins_another_chunk() -> None:
    arena = Arena()
    first, large, second = arena.take(100), arena.take(CHUNK + 1), arena.take(100)
    assert large.numel() == CHUNK + 1
    assert large.data_ptr() % LARGE_PAGE == 0
    large[-1] = 9
    assert not first.any() and not second.any()


@pytest.mark.skipif(not MAPS.exists(), reason="this system does not say what is mapped")
def test_a_chunk_goes_with_its_last_piece() -> None:
    arena = Arena()
    first = arena.take(CHUNK)
    address = first.data_ptr()
    second = arena.take(CHUNK)
    assert is_mapped(address)
    del first
    gc.collect()
    assert not is_mapped(address)
    assert is_mapped(second.data_ptr())


def test_a_system_without_large_pages_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_pages.mmap, "MADV_HUGEPAGE", 99999, raising=False)
    assert not Arena().take(100).any()
    monkeypatch.delattr(large_pages.mmap, "MADV_HUGEPAGE")
    assert not Arena().take(100).any()


def is_mapped(address: int) -> bool:
    ranges = (line.split(maxsplit=1)[0].split("-") for line in MAPS.read_text().splitlines())
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in ranges)
