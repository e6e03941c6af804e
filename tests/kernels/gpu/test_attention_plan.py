from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from kernels import AttentionRule, KVLayout, QuerySpan
from kernels.gpu import attention, work_list
from kernels.gpu.device_plan import GPUPlan
from kernels.plain.backend import TorchPlan

pytestmark = pytest.mark.interpret
LAYOUT = KVLayout(100, 2, 2, 16, 64)


def splits_of(length: int, window: int) -> list[tuple[int, int]]:
    """The keys of each split, said plainly."""
    begin = max(0, length - window) if window else 0
    size = 512
    while length - begin > 63 * size:
        size *= 2
    cuts = [begin, *range((begin // size + 1) * size, length, size), length]
    return list(zip(cuts, cuts[1:], strict=False))


@pytest.mark.slow
@pytest.mark.parametrize("window", [0, 100, 5000])
def test_the_work_list_has_every_split_once_and_cut_ones_last(device: torch.device, window: int) -> None:
    draw = random.Random(window)
    lengths = [1, 512, 513, 32256, 32257, 130_000, *(draw.randrange(1, 3000) for _ in range(30))]
    rows = [[i, 0 if i % 7 == 3 else 1, length - 1] for i, length in enumerate(lengths)]
    rows[8][1] = 5  # a span of several rows is not decode attention's
    places = sum(work_list.num_places(start + 1) for _, count, start in rows if count == 1)
    work = work_list.DecodeWork(len(rows), places, window, device)
    work.build(torch.tensor(rows, dtype=torch.int32, device=device))
    expected = {i: splits_of(start + 1, window) for i, count, start in rows if count == 1}
    counts, firsts = work.splits.T.tolist()
    assert counts == [len(expected.get(i, [])) for i in range(len(rows))]
    assert firsts == [sum(count for count in counts[:i] if count > 1) for i in range(len(rows))]
    items = work.items[: int(work.total)].tolist()
    found = {(i, begin, end): place for i, begin, end, place in items}
    assert len(found) == len(items)
    assert found == {
        (i, begin, end): -1 if len(splits) == 1 else firsts[i] + j
        for i, splits in expected.items()
        for j, (begin, end) in enumerate(splits)
    }
    cut = [end % 512 != 0 for _, _, end, _ in items]
    assert cut == sorted(cut)


@pytest.mark.slow
def test_more_spans_than_one_program_sees_in_one_go(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_list, "SPAN_BLOCK", 4)
    lengths = [600, 5, 1024, 700, 1, 512, 2000, 3, 9]
    work = work_list.DecodeWork(len(lengths), sum(map(work_list.num_places, lengths)), 0, device)
    work.build(torch.tensor([[i, 1, n - 1] for i, n in enumerate(lengths)], dtype=torch.int32, device=device))
    items = work.items[: int(work.total)].tolist()
    assert sorted((i, a, b) for i, a, b, _ in items) == [
        (i, *keys) for i, n in enumerate(lengths) for keys in splits_of(n, 0)
    ]


def test_room_for_partial_results_is_by_tokens(device: torch.device) -> None:
    """256 sequences of up to 100,000 tokens over a cache of 160,000: no room for 256 times 64 splits."""
    layout = LAYOUT._replace(num_blocks=10_000)
    plan = GPUPlan.empty(256, 6250, layout, 4, device)
    assert plan.num_places == 256 + 160_000 // 512
    assert plan.takes([512] * 256) and plan.takes([625] * 256) and plan.takes([100_000, *([230] * 255)])
    shared = [QuerySpan(i, 1, 99_999, range(6250)) for i in range(256)]
    assert not plan.takes(span.length for span in shared)  # they share the blocks of one prefix
    with pytest.raises(ValueError, match="more than 568 partial results"):
        plan.fill(shared)
    exact = attention.plan_attention([*shared[:2], QuerySpan(2, 1, 511, range(32))], layout, 4, device)
    assert exact.num_places == 2 * 64


def test_a_plan_is_filled_in_place(device: torch.device) -> None:
    plan = GPUPlan.empty(3, 4, LAYOUT, 4, device)
    places = (plan.spans.data_ptr(), plan.block_tables.data_ptr())
    plan.fill([QuerySpan(0, 1, 40, [7, 8, 9, 99, 99, 99]), QuerySpan(1, 1, 0, [5])])
    plan.fill([QuerySpan(4, 1, 20, (3, 6, 50))])
    assert plan.spans.tolist() == [[4, 1, 20], [0, 0, 0], [0, 0, 0]]
    assert plan.block_tables[0, :2].tolist() == [3, 6]
    assert places == (plan.spans.data_ptr(), plan.block_tables.data_ptr())
    assert all(place % 16 == 0 for place in places)


@pytest.mark.parametrize(
    ("spans", "words"),
    [
        ([QuerySpan(0, 1, 0, [1])] * 4, "4 spans do not fit a plan of 3"),
        ([QuerySpan(0, 2, 0, [1])], "2 rows"),
        ([QuerySpan(0, 1, 64, [1] * 5)], "5 blocks"),
    ],
)
def test_what_does_not_fit_is_refused(device: torch.device, spans: list[QuerySpan], words: str) -> None:
    plan = GPUPlan.empty(3, 4, LAYOUT, 4, device)
    with pytest.raises(ValueError, match=words):
        plan.fill(spans)
    assert plan.spans.tolist() == [[0, 0, 0]] * 3


def test_no_spans(make_case: Any, device: torch.device) -> None:
    plan = attention.plan_attention([], LAYOUT, 4, device)
    q, kv = torch.empty(0, 4, 64, device=device), torch.empty(*LAYOUT[:4], 2, 64, device=device)
    assert attention.paged_attention(q, kv, 0, plan, AttentionRule(1.0)).shape == (0, 4, 64)


def test_a_plan_of_another_backend_is_refused(device: torch.device) -> None:
    q = torch.empty(1, 4, 64, device=device)
    with pytest.raises(TypeError, match="TorchPlan"):
        attention.paged_attention(q, q, 0, TorchPlan([], LAYOUT, device), AttentionRule(1.0))
