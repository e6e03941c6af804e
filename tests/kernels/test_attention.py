"""Every backend against the float64 reference, at awkward sizes; slots that belong to nobody hold NaN."""

from __future__ import annotations

import math
import mmap
from typing import Any

import pytest
import torch

from common.blocks.window import HOLE, Window
from kernels import AttentionRule, KVLayout, QuerySpan
from kernels.plain import backend as torch_backend
from kernels.plain import reference

MIXED = [(1, 0), (1, 4), (13, 5), (1, 128), (334, 129), (1, 1327), (1, 63), (64, 64), (2, 62), (1, 1000)]


def worst(case: Any, out: torch.Tensor, **options: Any) -> float:
    expected = reference.paged_attention(
        case.q.double(), case.kv, 1, case.spans, scale=case.layout.head_dim**-0.5, **options
    )
    return float((out.double() - expected).abs().max())


@pytest.mark.slow_except("torch-32", "torch-128", "native-32")
@pytest.mark.parametrize("block", [16, 32, 64, 128])
def test_block_sizes(each_backend: Any, make_case: Any, block: int) -> None:
    case = make_case(MIXED, block=block)
    assert worst(case, case.run(each_backend)) < 3e-6


@pytest.mark.quick_cover(2)
@pytest.mark.parametrize("dim", [16, 24, 64, 80, 96, 128, 256])
def test_head_sizes(each_backend: Any, make_case: Any, dim: int) -> None:
    case = make_case([(1, 17), (5, 18), (1, 0), (70, 3)], dim=dim)
    assert worst(case, case.run(each_backend)) < 3e-6


@pytest.mark.quick_cover(1)
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (2, 1), (4, 4), (9, 3), (8, 1), (14, 2), (16, 1), (32, 2)])
def test_head_groups(each_backend: Any, make_case: Any, heads: int, kv_heads: int) -> None:
    case = make_case([(1, 200), (18, 5), (1, 3), (65, 0)], heads=heads, kv_heads=kv_heads)
    assert worst(case, case.run(each_backend)) < 3e-6


@pytest.mark.quick_cover(1)
@pytest.mark.slow_cases("torch-7", "torch-65", "torch-5000")
@pytest.mark.parametrize("window", [1, 7, 16, 64, 65, 500, 5000])
def test_windows(each_backend: Any, make_case: Any, window: int) -> None:
    case = make_case(MIXED)
    assert worst(case, case.run(each_backend, window=window), window=window) < 3e-6


@pytest.mark.quick_cover(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [1, 7, 16, 64, 65, 500])
def test_blocks_out_of_the_window_are_never_read(
    each_backend: Any, make_case: Any, window: int, dtype: torch.dtype
) -> None:
    """They may be anyone's by now, or written while the step runs: here they hold NaN, and the table has holes."""
    case = make_case(MIXED, dtype=dtype)
    expected, whole = case.run(each_backend, window=window), case.spans
    case.spans, case.kv = [], case.kv.clone()
    for span in whole:
        gone = Window(window, 16).first_block(span.start)
        case.kv[list(span.block_table[:gone])] = float("nan")
        case.spans.append(span._replace(block_table=[HOLE] * gone + list(span.block_table[gone:])))
    assert any(HOLE in span.block_table for span in case.spans)
    assert torch.equal(case.run(each_backend, window=window), expected)


@pytest.mark.parametrize("window", [0, 33])
def test_softcap(each_backend: Any, make_case: Any, window: int) -> None:
    case = make_case([(1, 100), (40, 0), (7, 60)])
    case.q *= 20
    options = {"window": window, "softcap": 5.0}
    assert worst(case, case.run(each_backend, **options), **options) < 1e-5


@pytest.mark.quick_cover(2)
@pytest.mark.parametrize("options", [{}, {"window": 33}, {"softcap": 5.0}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sinks(each_backend: Any, make_case: Any, dtype: torch.dtype, options: dict[str, Any]) -> None:
    """One more logit a head: far below the scores, among them, above them, and beyond any."""
    case = make_case([(1, 0), (1, 100), (40, 3), (7, 60)], dtype=dtype)
    options |= {"sinks": torch.tensor([-300.0, 0.5, 4.0, 300.0])}
    out = case.run(each_backend, **options)
    assert worst(case, out, **options) < (0.02 if dtype == torch.bfloat16 else 3e-6)
    assert not out[:, 3].any() and out[:, 0].abs().amin(-1).isfinite().all()


@pytest.mark.slow
def test_bfloat16_rounds_only_what_it_stores(each_backend: Any, make_case: Any) -> None:
    case = make_case(MIXED, dtype=torch.bfloat16, heads=9, kv_heads=3)
    assert worst(case, case.run(each_backend)) < 0.02


def test_large_scores_stay_finite(each_backend: Any, make_case: Any) -> None:
    case = make_case([(1, 300), (30, 40)])
    case.q *= 1000
    out = case.run(each_backend)
    assert out.isfinite().all() and worst(case, out) < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_no_number_stays_none(native: Any, make_case: Any, dtype: torch.dtype) -> None:
    """So that a sequence whose numbers overflowed is seen, and only that one."""
    case = make_case([(1, 70), (1, 70), (9, 0)], dtype=dtype)
    case.q[1, :, 3] = float("nan")
    case.q[5, 0, 0] = float("nan")
    out = case.run(native)
    assert out[1].isnan().all() and out[5, 0].isnan().all()
    assert out[[0, 2, 3, 4, 6, 7, 8, 9, 10]].isfinite().all()


def test_shared_prefix_blocks(each_backend: Any, make_case: Any) -> None:
    case = make_case([(1, 100), (1, 100)])
    first, second = case.spans
    case.spans[1] = second._replace(block_table=[*first.block_table[:4], *second.block_table[4:]])
    assert worst(case, case.run(each_backend)) < 3e-6


def test_queries_may_be_a_slice_of_a_wider_tensor(each_backend: Any, make_case: Any) -> None:
    case = make_case([(3, 20), (1, 7)])
    case.q = torch.cat((case.q, torch.full_like(case.q, float("nan"))), dim=1)[:, : case.heads]
    assert worst(case, case.run(each_backend)) < 3e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 80), (8, 2, 128), (5, 1, 16)])
def test_a_row_does_not_depend_on_batch_or_chunk(
    native: Any, make_case: Any, dtype: torch.dtype, heads: int, kv_heads: int, dim: int
) -> None:
    """Bit for bit, as one prompt of 200 tokens or as steps of a few tokens, which few rows go another way for."""
    case = make_case([(200, 0), (1, 77), (30, 9)], heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype)
    options = {"window": 50, "sinks": torch.randn(heads)}
    together = case.run(native, **options)
    whole, queries = case.spans[0], case.q
    for first, count in [(0, 1), (63, 2), (64, 1), (130, 70), (199, 1)]:
        case.spans = [whole._replace(row=0, num_rows=count, start=first)]
        case.q = queries[first : first + count].clone()
        assert torch.equal(case.run(native, **options), together[first : first + count])


def test_a_row_does_not_depend_on_threads(native: Any, make_case: Any) -> None:
    case, before, results = make_case(MIXED), torch.get_num_threads(), []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        results.append(case.run(native))
    torch.set_num_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_addresses_beyond_two_to_the_31(each_backend: Any, dtype: torch.dtype) -> None:
    """The last block of a cache of 2.2e9 elements, of which the system maps only the pages that are touched."""
    layout = KVLayout(33_600, 8, 4, 16, 64)
    shape = (*layout[:4], 2, layout.head_dim)
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    kv = torch.frombuffer(pages, dtype=dtype).view(shape)
    assert kv.numel() > 2**31
    last = layout.num_blocks - 1
    kv[last, 7] = torch.randn(4, 16, 2, 64).to(dtype)
    spans, q = [QuerySpan(0, 1, 15, [last]), QuerySpan(1, 2, 14, [last])], torch.randn(3, 4, 64).to(dtype)
    plan = each_backend.plan_attention(spans, layout, 4, torch.device("cpu"))
    out = each_backend.paged_attention(q, kv, 7, plan, AttentionRule(0.125))
    expected = reference.paged_attention(q.double(), kv, 7, spans, scale=0.125)
    assert float((out.double() - expected).abs().max()) < (0.02 if dtype == torch.bfloat16 else 3e-6)


def test_a_plan_of_another_backend_is_refused(native: Any, make_case: Any) -> None:
    case = make_case([(1, 1)])
    plan = native.plan_attention(case.spans, case.layout, case.heads, torch.device("cpu"))
    with pytest.raises(TypeError, match="NativePlan"):
        torch_backend.paged_attention(case.q, case.kv, 0, plan, AttentionRule(1.0))
