"""Which chunks have their keys split, and the lists that say so: every key of every row, once."""

from __future__ import annotations

import random
from collections import defaultdict
from itertools import pairwise

import pytest
import torch

from kernels import KVLayout, QuerySpan
from kernels.agreement.attention import FEW_ROWS, SPLIT_CHUNK
from kernels.gpu import attention, query_work
from kernels.gpu.query_work import QueryWork, Tiling, split_keys

pytestmark = pytest.mark.cpu
LLAMA = Tiling(tokens=32, programs=8, heads=32)
TILINGS = [LLAMA, Tiling(128, 32, 32), Tiling(16, 1, 8), Tiling(1, 4, 128), Tiling(6, 1, 20)]
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("num_rows", "start", "window", "expected"),
    [
        (64, 32_768, 0, (0, 2176, 16)),  # 16 programs become 256
        (5, 32_768, 0, (0, 1152, 29)),
        (256, 100_000, 0, (0, 25_088, 4)),
        (257, 100_000, 0, (0, 0, 0)),  # 72 programs
        (9, SPLIT_CHUNK - 9, 0, (0, 512, 5)),
        (9, 2030, 0, (0, 0, 0)),
        (64, 32_768, 1024, (0, 0, 0)),
        (64, 32_768, 4096, (28_672, 512, 9)),
    ],
)
def test_few_programs_of_many_keys_are_split(
    num_rows: int, start: int, window: int, expected: tuple[int, int, int]
) -> None:
    """Of a Llama 8B."""
    assert split_keys(num_rows, start, window, LLAMA) == expected


@pytest.mark.parametrize("tiling", TILINGS)
def test_splits_are_bounded_and_begin_with_a_tile(tiling: Tiling) -> None:
    draw = random.Random(tiling.heads)
    seen = 0
    for _ in range(2000):
        rows, start = draw.randrange(2, 600), draw.randrange(150_000)
        window = draw.choice([0, 0, 100, 4096, 20_000])
        first, length, count = split_keys(rows, start, window, tiling)
        if not count:
            continue
        seen += 1
        tiles = -(-rows // tiling.tokens)
        assert count >= 2 and tiles * tiling.programs * count <= query_work.MOST_PROGRAMS
        assert first % 128 == 0 and length % 128 == 0 and length >= query_work.LEAST_SPLIT_TOKENS
        assert first <= (max(0, start + 1 - window) if window else 0)
        assert first + (count - 1) * length < start + rows <= first + count * length
    assert seen > 20


def made(
    spans: list[tuple[int, int, int]], tiling: Tiling = LLAMA, window: int = 0, *, split: bool = True
) -> QueryWork:
    return query_work.query_work(spans, tiling, window, CPU, split=split)


SPANS = [(0, 5, 40_000), (5, 1, 70_000), (6, 300, 9000), (306, 64, 32_768), (370, 40, 100), (410, 2, 3000)]


@pytest.mark.parametrize("tiling", TILINGS)
@pytest.mark.parametrize("window", [0, 4096])
def test_every_tile_meets_all_keys_and_every_row_all_partial_results(tiling: Tiling, window: int) -> None:
    """As the kernels read the lists: a place is written once, and read by the row that it is of."""
    work = made(SPANS, tiling, window)
    split = {i: split_keys(*SPANS[i][1:], window, tiling) for i in (0, 2, 3, 4, 5)}
    assert sorted(work.tiles.tolist()) == [
        [i, at] for i, keys in split.items() if not keys[2] for at in range(0, SPANS[i][1], tiling.tokens)
    ]
    found = 0
    for part in work.rounds:
        written: dict[int, tuple[int, int]] = {}  # place: row, first key of a split
        keys = defaultdict(list)
        for i, token, begin, end, place, stride in part.items.tolist():
            keys[i, token].append((begin, end))
            row, count, _ = SPANS[i]
            assert stride == split[i][2] and token % tiling.tokens == 0
            for each in range(token, min(token + tiling.tokens, count)):
                assert written.setdefault(place + (each - token) * stride, (row + each, begin)) == (row + each, begin)
        for (i, _), cuts in keys.items():
            cuts.sort()
            assert cuts[0][0] == split[i][0] and cuts[-1][1] >= sum(SPANS[i][1:])
            assert len(cuts) == split[i][2] and all(a[1] == b[0] for a, b in pairwise(cuts))
        read: list[int] = []
        for (row, one, _), (count, first) in zip(part.rows.tolist(), part.splits.tolist(), strict=True):
            assert one == 1
            parts = [written[first + j] for j in range(count)]
            assert {r for r, _ in parts} == {row} and parts == sorted(parts)
            read += range(first, first + count)
        assert sorted(read) == sorted(written) == list(range(len(read))) and len(read) <= work.places
        found += len(part.rows)
    assert found == sum(SPANS[i][1] for i, keys in split.items() if keys[2]) > 0


def test_rounds_keep_partial_results_within_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of 200 sequences whose drafts are checked; a chunk that is too large has a round of its own."""
    spans = [(5 * i, 5, 30_000) for i in range(200)]
    work = made(spans)
    each = 5 * split_keys(5, 30_000, 0, LLAMA)[2] * LLAMA.heads
    assert work.places * LLAMA.heads <= query_work.MOST_PARTIALS < work.places * LLAMA.heads + each
    assert sum(len(part.rows) for part in work.rounds) == 1000
    monkeypatch.setattr(query_work, "MOST_PARTIALS", 1)
    assert len(made(spans).rounds) == 200


@pytest.mark.parametrize("tiling", TILINGS)
def test_a_chunks_partial_results_are_half_of_that_memory(tiling: Tiling) -> None:
    """So is the room that they take known, whatever the model and the prompt: by the rows of a tile."""
    for rows in range(2, 300):
        count = split_keys(rows, 200_000, 0, tiling)[2]
        tile_rows = tiling.tokens * tiling.heads / tiling.programs
        assert rows * count * tiling.heads <= query_work.MOST_PROGRAMS * tile_rows <= query_work.MOST_PARTIALS / 2


def test_lists_begin_at_16_bytes() -> None:
    """Else kernels would be compiled anew for some steps."""
    work = made(SPANS)
    tensors = [work.tiles, *(tensor for part in work.rounds for tensor in part)]
    assert len(tensors) > 3 and all(tensor.data_ptr() % 16 == 0 and tensor.is_contiguous() for tensor in tensors)


def test_nothing_is_split_where_chunks_must_have_the_same_bits() -> None:
    work = made(SPANS, split=False)
    assert work.rounds == () and work.places == 0
    assert sorted({i for i, _ in work.tiles.tolist()}) == [0, 2, 3, 4, 5]


def test_the_longest_query_tiles_come_first() -> None:
    layout = KVLayout(100, 2, 2, 16, 64)
    spans = [QuerySpan(0, 20, 0, [1, 2]), QuerySpan(20, 1, 90, [3] * 6), QuerySpan(21, 9, 100, [4] * 7)]
    plan = attention.plan_attention(spans, layout, 4, CPU)
    work = plan.query_work(Tiling(8, 2, 4), 0, split=True)
    assert work.tiles.tolist() == [[2, 8], [2, 0], [0, 16], [0, 8], [0, 0]] and not work.rounds
    assert plan.query_work(Tiling(8, 2, 4), 0, split=True) is work


@pytest.mark.parametrize("tiling", [*TILINGS, Tiling(1, 4, 128), Tiling(128, 64, 64), Tiling(8, 8, 128)])
def test_the_check_of_a_start_has_a_chunk_that_is_split(tiling: Tiling) -> None:
    assert split_keys(FEW_ROWS, SPLIT_CHUNK - FEW_ROWS, 0, tiling)[2] > 1
