"""Single-row spans against the float64 reference; slots of nobody and unwritten output hold NaN."""

from __future__ import annotations

import math
import mmap
from typing import Any

import pytest
import torch

from kernels import AttentionRule, KVLayout, QuerySpan
from kernels.gpu import attention, work_list
from kernels.gpu.device_plan import GPUPlan
from kernels.plain import reference

from .attention_case import attend, error
from .compiled import CHIPS

pytestmark = pytest.mark.interpret
LENGTHS = [1, 19, 64, 129, 512, 592, 1328]
SPANS = [(1, length - 1) for length in LENGTHS]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_lengths(make_case: Any, device: torch.device, dtype: torch.dtype) -> None:
    case = make_case(SPANS[:-1] if dtype == torch.float32 else SPANS, block=64, dtype=dtype)
    assert error(case, attend(case, device)) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(16, marks=pytest.mark.slow),
        32,
        pytest.param(48, marks=pytest.mark.slow),
        pytest.param(128, marks=pytest.mark.slow),
    ],
)
def test_block_sizes(make_case: Any, device: torch.device, block: int) -> None:
    case = make_case([(1, 0), (1, 130), (1, 591)], block=block, dtype=torch.float16)
    assert error(case, attend(case, device)) < 2e-3


@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_head_sizes(make_case: Any, device: torch.device, dim: int) -> None:
    case = make_case([(1, 17), (1, 0), (1, 75)], dim=dim, block=32)
    assert error(case, attend(case, device)) < 2e-6


@pytest.mark.parametrize(
    ("heads", "kv_heads"),
    [
        (1, 1),
        pytest.param(4, 4, marks=pytest.mark.slow),
        pytest.param(9, 3, marks=pytest.mark.slow),
        (14, 2),
        (8, 1),
        (16, 1),
        (20, 1),
    ],
)
def test_head_groups(make_case: Any, device: torch.device, heads: int, kv_heads: int) -> None:
    case = make_case([(1, 70), (1, 3)], heads=heads, kv_heads=kv_heads, dtype=torch.float16)
    assert error(case, attend(case, device)) < 2e-3


@pytest.mark.parametrize(
    "window",
    [
        pytest.param(1, marks=pytest.mark.slow),
        pytest.param(64, marks=pytest.mark.slow),
        65,
        pytest.param(700, marks=pytest.mark.slow),
    ],
)
def test_windows(make_case: Any, device: torch.device, window: int) -> None:
    """The blocks that a window has left behind may be anyone's: their table entries must not be followed."""
    case = make_case([(1, 0), (1, 63), (1, 128), (1, 1327)], block=64, dtype=torch.float16)
    for i, span in enumerate(case.spans):
        gone = max(0, span.length - window) // 64
        case.spans[i] = span._replace(block_table=[-(2**30)] * gone + list(span.block_table[gone:]))
    out = attend(case, device, window=window)
    for i, span in enumerate(case.spans):
        case.spans[i] = span._replace(block_table=[max(0, block) for block in span.block_table])
    assert error(case, out, window=window) < 2e-3


@pytest.mark.parametrize("length", [33, pytest.param(600, marks=pytest.mark.slow)])
def test_softcap_and_sinks(make_case: Any, device: torch.device, length: int) -> None:
    case = make_case([(1, length - 1), (1, 0)])
    case.q *= 20
    sinks = torch.tensor([-3.0, 0.0, 4.0, 60.0])  # the last leaves next to nothing for the values
    for options in ({"softcap": 5.0}, {"sinks": sinks}, {"softcap": 5.0, "sinks": sinks, "window": 40}):
        assert error(case, attend(case, device, **options), **options) < 5e-6


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("by_bits", [False, True])
def test_float8_cache(
    make_case: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, by_bits: bool
) -> None:
    """Converted by the chip, and by shifting bits for chips that cannot; small numbers are subnormal ones in e4m3."""
    if by_bits:
        monkeypatch.setattr("kernels.gpu.scores.chip_of", lambda device: CHIPS[80])
    case = make_case([(1, 40), (1, 600)], block=64, dtype=dtype)
    case.kv[:, :, :, ::2] *= 0.01
    case.kv = case.kv.to(torch.float8_e4m3fn)
    options = {"k_scale": 3.0, "v_scale": 0.37}
    assert error(case, attend(case, device, **options), **options) < TOLERANCE[dtype]


def test_small_probabilities_of_a_float8_cache(make_case: Any, device: torch.device) -> None:
    """One key takes nearly all; what the others add is far below e4m3's smallest number."""
    case = make_case([(1, 99)], dtype=torch.bfloat16, heads=2)
    case.q *= 0
    case.q[..., 0] = 64.0
    table = case.spans[0].block_table
    for i in range(100):
        case.kv[table[i // 16], :, :, i % 16, 0, 0] = 1.0 if i == 50 else 0.0
    case.kv = case.kv.to(torch.float8_e4m3fn)
    assert error(case, attend(case, device)) < 0.02


@pytest.mark.slow
def test_large_scores_stay_finite(make_case: Any, device: torch.device) -> None:
    case = make_case([(1, 29), (1, 599)], block=64)
    case.q *= 1000
    out = attend(case, device)
    assert out.isfinite().all() and error(case, out) < 1e-3


def test_queries_may_be_a_slice_of_a_wider_tensor(make_case: Any, device: torch.device) -> None:
    case = make_case([(1, 20), (1, 7)])
    case.q = torch.cat((case.q, torch.full_like(case.q, float("nan"))), dim=1)[:, : case.heads]
    assert error(case, attend(case, device)) < 2e-6


@pytest.mark.slow
def test_padding_of_a_graph_stays_unwritten(make_case: Any, device: torch.device) -> None:
    """One plan for several steps, as a captured graph uses it; each leaves the rows of nobody as they were."""
    case = make_case([(1, 700), (1, 30), (1, 5)], dtype=torch.float16)
    plan = GPUPlan.empty(5, 64, case.layout, case.heads, device)
    spans = case.spans
    for chosen in ([], spans[:2], spans[1:], spans[2:], spans):
        plan.fill(chosen)
        plan.prepare()
        out, rows = attend(case, device, plan), {span.row for span in chosen}
        assert [bool(row.isnan().all()) for row in out] == [i not in rows for i in range(3)]
        case.spans = chosen
        expected = reference.paged_attention(case.q.double(), case.kv, 1, chosen, scale=0.125)
        assert float((out.double() - expected).nan_to_num().abs().max()) < 2e-3


@pytest.mark.gpu
def test_a_captured_graph_follows_its_plan(make_case: Any, device: torch.device) -> None:
    case = make_case([(1, 700), (1, 30), (1, 5)], dtype=torch.float16)
    spans, q, kv = case.spans, case.q.to(device), case.kv.to(device)
    plan = GPUPlan.empty(4, 64, case.layout, case.heads, device)

    def step() -> torch.Tensor:
        plan.prepare()
        return attention.paged_attention(q, kv, 1, plan, AttentionRule(0.125))

    plan.fill(spans[:1])
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for chosen in (spans, spans[1:], spans[:2]):
        plan.fill(chosen)
        graph.replay()
        case.spans = chosen
        eager, rows = attend(case, device), [span.row for span in chosen]
        assert torch.equal(out.cpu()[rows], eager[rows])


@pytest.mark.slow
@pytest.mark.parametrize("window", [0, 150])
def test_a_sequence_does_not_depend_on_its_batch(
    make_case: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    """Bit for bit: alone, among others, in another order, in a wider plan, with splits and without."""
    monkeypatch.setattr(work_list, "SPLIT_TOKENS", 64)
    case = make_case([(1, 327), (1, 17), (1, 191), (1, 0), (1, 64)], heads=3, kv_heads=1, dtype=torch.float16)
    spans = case.spans
    together = attend(case, device, window=window)
    case.spans = spans[::-1]
    assert torch.equal(attend(case, device, window=window), together)
    wide = GPUPlan.empty(9, 300, case.layout, case.heads, device)
    wide.fill(spans[1:4])
    assert torch.equal(attend(case, device, wide, window=window)[1:4], together[1:4])
    for span in spans:
        case.spans = [span]
        assert torch.equal(attend(case, device, window=window)[span.row], together[span.row])


@pytest.mark.slow
@pytest.mark.parametrize("window", [0, 37, 300])
def test_many_splits(make_case: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch, window: int) -> None:
    """Splits of 64 tokens, but for sequences that would have more than three of them."""
    monkeypatch.setattr(work_list, "SPLIT_TOKENS", 64)
    monkeypatch.setattr(work_list, "MAX_SPLITS", 4)
    case = make_case([(1, length - 1) for length in (1, 64, 65, 192, 193, 385)], dtype=torch.float16)
    sinks = torch.randn(4)
    out = attend(case, device, window=window, sinks=sinks)
    assert error(case, out, window=window, sinks=sinks) < 2e-3


def test_addresses_beyond_two_to_the_31(device: torch.device) -> None:
    """The last block of a cache of 2.2e9 elements, of which the system maps only the pages that are touched."""
    layout = KVLayout(33_600, 8, 4, 16, 64)
    shape = (*layout[:4], 2, layout.head_dim)
    if device.type == "cuda":
        kv = torch.empty(shape, dtype=torch.float16, device=device)
    else:
        pages = mmap.mmap(-1, math.prod(shape) * 2, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        kv = torch.frombuffer(pages, dtype=torch.float16).view(shape)
    assert kv.numel() > 2**31
    last = layout.num_blocks - 1
    kv[last, 7] = torch.randn(4, 16, 2, 64).to(kv)
    spans = [QuerySpan(0, 1, 15, [last]), QuerySpan(1, 2, 14, [last])]
    q = torch.randn(3, 4, 64).half().to(device)
    plan = attention.plan_attention(spans, layout, 4, device)
    out = attention.paged_attention(q, kv, 7, plan, AttentionRule(0.125)).cpu()
    near = [span._replace(block_table=[0]) for span in spans]
    expected = reference.paged_attention(q.cpu().double(), kv[last:].cpu(), 7, near, scale=0.125)
    assert float((out.double() - expected).abs().max()) < 2e-3
