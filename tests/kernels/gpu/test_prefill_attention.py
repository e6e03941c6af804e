"""Spans of several rows against the float64 reference; slots that belong to nobody hold NaN."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from .attention_case import attend, error
from .compiled import CHIPS

pytestmark = pytest.mark.interpret
MIXED = [(13, 5), (1, 30), (64, 64), (2, 62), (129, 334), (5, 13)]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@pytest.mark.slow_except("16-dtype0")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("block", [16, 64])
def test_spans_with_a_cached_prefix(make_case: Any, device: torch.device, block: int, dtype: torch.dtype) -> None:
    case = make_case(MIXED, block=block, dtype=dtype)
    assert error(case, attend(case, device)) < TOLERANCE[dtype]


@pytest.mark.slow
def test_float32(make_case: Any, device: torch.device) -> None:
    case = make_case([(21, 0), (1, 9), (9, 40)])
    assert error(case, attend(case, device)) < 2e-6


@pytest.mark.parametrize(
    "block", [pytest.param(32, marks=pytest.mark.slow), 48, pytest.param(128, marks=pytest.mark.slow)]
)
def test_block_sizes(make_case: Any, device: torch.device, block: int) -> None:
    case = make_case([(3, 129), (70, 0)], block=block, dtype=torch.float16)
    assert error(case, attend(case, device)) < 2e-3


@pytest.mark.parametrize(
    "dim",
    [
        pytest.param(64, marks=pytest.mark.slow),
        80,
        96,
        pytest.param(128, marks=pytest.mark.slow),
        pytest.param(256, marks=pytest.mark.slow),
    ],
)
def test_head_sizes(make_case: Any, device: torch.device, dim: int) -> None:
    case = make_case([(5, 18), (66, 3)], dim=dim, block=32, dtype=torch.float16)
    assert error(case, attend(case, device)) < 2e-3


@pytest.mark.parametrize(
    ("heads", "kv_heads"),
    [
        (1, 1),
        pytest.param(4, 4, marks=pytest.mark.slow),
        pytest.param(9, 3, marks=pytest.mark.slow),
        pytest.param(14, 2, marks=pytest.mark.slow),
        pytest.param(16, 1, marks=pytest.mark.slow),
        pytest.param(20, 1, marks=pytest.mark.slow),
    ],
)
def test_head_groups(make_case: Any, device: torch.device, heads: int, kv_heads: int) -> None:
    case = make_case([(18, 5), (50, 0)], heads=heads, kv_heads=kv_heads, dtype=torch.float16)
    assert error(case, attend(case, device)) < 2e-3


@pytest.mark.slow
@pytest.mark.parametrize("window", [1, 7, 64, 65, 500])
def test_windows(make_case: Any, device: torch.device, window: int) -> None:
    """The blocks that a window has left behind may be anyone's: their table entries must not be followed."""
    case = make_case([(163, 329), (2, 62), (9, 0)], block=64, dtype=torch.float16)
    for i, span in enumerate(case.spans):
        gone = max(0, span.start + 1 - window) // 64
        case.spans[i] = span._replace(block_table=[-(2**30)] * gone + list(span.block_table[gone:]))
    out = attend(case, device, window=window)
    for i, span in enumerate(case.spans):
        case.spans[i] = span._replace(block_table=[max(0, block) for block in span.block_table])
    assert error(case, out, window=window) < 2e-3


def test_softcap_and_sinks(make_case: Any, device: torch.device) -> None:
    case = make_case([(20, 33), (6, 0)])
    case.q *= 20
    sinks = torch.tensor([-3.0, 0.0, 4.0, 60.0])
    for options in ({"softcap": 5.0}, {"sinks": sinks}, {"softcap": 5.0, "sinks": sinks, "window": 17}):
        assert error(case, attend(case, device, **options), **options) < 2e-5  # scores are in the hundreds


@pytest.mark.slow_cases("False-dtype0", "True-dtype0", "True-dtype2")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("by_bits", [False, True])
def test_float8_cache(
    make_case: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, by_bits: bool
) -> None:
    if by_bits:
        monkeypatch.setattr("kernels.gpu.scores.chip_of", lambda device: CHIPS[80])
    case = make_case([(20, 30), (9, 0)], block=64, dtype=dtype)
    case.kv = case.kv.to(torch.float8_e4m3fn)
    options = {"k_scale": 0.5, "v_scale": 2.5}
    assert error(case, attend(case, device, **options), **options) < 2 * TOLERANCE[dtype]


def test_rows_of_nobody_stay_unwritten(make_case: Any, device: torch.device) -> None:
    case = make_case([(5, 18), (3, 0), (40, 2)], dtype=torch.float16)
    case.spans = [case.spans[0], case.spans[2]]
    out = attend(case, device)
    assert out[5:8].isnan().all() and not out[:5].isnan().any() and not out[8:].isnan().any()


@pytest.mark.slow
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (50, 0.0), (0, 4.0)])
def test_a_row_does_not_depend_on_batch_or_chunk(
    make_case: Any, device: torch.device, window: int, softcap: float
) -> None:
    """Bit for bit, as one prompt of 200 tokens or in chunks of two or more."""
    case = make_case([(200, 0), (2, 77), (30, 9)], heads=9, kv_heads=3, dtype=torch.float16)
    together = attend(case, device, window=window, softcap=softcap)
    whole, queries = case.spans[0], case.q
    for first, count in [(0, 2), (63, 2), (64, 3), (130, 70), (197, 3)]:
        case.spans = [whole._replace(row=0, num_rows=count, start=first)]
        case.q = queries[first : first + count].clone()
        assert torch.equal(attend(case, device, window=window, softcap=softcap), together[first : first + count])
