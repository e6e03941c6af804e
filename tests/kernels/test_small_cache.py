"""KV caches of 8-bit numbers on every CPU backend: what is stored, what is read, and that a row stays its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from kernels import AttentionRule, HeadNorms, KVLayout, KVScales, QuerySpan
from kernels.cpu.backend import native_backend
from kernels.interface.kv_region import numbers_of, packed, scales_of, unpacked
from kernels.plain import backend as torch_backend
from kernels.plain import reference

from .conftest import Case

FP8 = torch.float8_e4m3fn
DTYPES = [torch.float32, torch.bfloat16]
MIXED = [(1, 0), (1, 4), (13, 5), (1, 128), (70, 129), (1, 700), (1, 63), (64, 64), (2, 62)]


@pytest.fixture(params=[FP8, torch.int8], ids=["fp8", "int8"])
def kv_dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return cast(torch.dtype, request.param)


def case_of(spans: Sequence[tuple[int, int]], kv_dtype: torch.dtype, **options: Any) -> Case:
    case = Case(list(spans), **options)
    case.kv = packed(case.kv.float(), kv_dtype)  # slots of nobody hold NaN in 8 bits too
    return case


def worst(case: Case, out: Tensor, **options: Any) -> float:
    scale = case.layout.head_dim**-0.5
    expected = reference.paged_attention(case.q.double(), case.kv, 1, case.spans, scale=scale, **options)
    return float((out.double() - expected).abs().max())


@pytest.mark.quick_cover(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [16, 24, 32, 48, 64, 80, 96, 112, 128, 256])
def test_head_sizes(each_backend: Any, dim: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    case = case_of([(1, 17), (5, 18), (1, 0), (70, 3), (1, 90)], kv_dtype, dim=dim, dtype=dtype)
    assert worst(case, case.run(each_backend)) < (0.02 if dtype == torch.bfloat16 else 5e-6)


@pytest.mark.quick_cover(2)
@pytest.mark.slow_cases("torch-*")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "options",
    [{}, {"window": 33}, {"softcap": 5.0}, {"k_scale": 0.5, "v_scale": 1.5}, {"k_scale": 1.75, "softcap": 5.0}],
)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (9, 3), (8, 1)])
def test_groups_windows_and_softcap(
    each_backend: Any, heads: int, kv_heads: int, options: dict[str, Any], dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    case = case_of(MIXED, kv_dtype, heads=heads, kv_heads=kv_heads, dtype=dtype)
    assert worst(case, case.run(each_backend, **options), **options) < (0.02 if dtype == torch.bfloat16 else 5e-6)


@pytest.mark.quick_cover(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 80), (8, 2, 128), (5, 1, 16), (2, 2, 112)])
def test_a_row_does_not_depend_on_batch_or_chunk(
    native: Any, dtype: torch.dtype, kv_dtype: torch.dtype, heads: int, kv_heads: int, dim: int
) -> None:
    case = case_of([(200, 0), (1, 77), (30, 9)], kv_dtype, heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype)
    together = case.run(native, window=50)
    whole, queries = case.spans[0], case.q
    for first, count in [(0, 1), (63, 2), (64, 1), (130, 70), (199, 1)]:
        case.spans = [whole._replace(row=0, num_rows=count, start=first)]
        case.q = queries[first : first + count].clone()
        assert torch.equal(case.run(native, window=50), together[first : first + count])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 16])
def test_every_code_is_read_as_torch_reads_it(each_backend: Any, dtype: torch.dtype, rows: int) -> None:
    """Of a first token attention is its value. Rows of 16 heads go another way than a few do."""
    codes = torch.arange(256, dtype=torch.uint8)
    kv = torch.zeros(2, 1, 2, 16, 2, 128, dtype=FP8)
    kv.view(torch.uint8)[1, 0, :, 0, 1] = codes.view(2, 128)
    layout, span = KVLayout(2, 1, 2, 16, 128), QuerySpan(0, 1, 0, [1])
    plan = each_backend.plan_attention([span], layout, 2 * rows, torch.device("cpu"))
    out = each_backend.paged_attention(torch.zeros(1, 2 * rows, 128, dtype=dtype), kv, 0, plan, AttentionRule(1.0))
    expected = codes.view(FP8).to(dtype).view(1, 2, 1, 128).expand(1, 2, rows, 128).reshape(1, 2 * rows, 128)
    assert out.isnan().sum() == 2 * rows
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [1, 16])
def test_every_code_is_multiplied_as_what_it_is(each_backend: Any, dtype: torch.dtype, heads: int) -> None:
    """A query that is 1 in one dimension picks a number of the key there; the softmax of two scores tells which."""
    kinds = torch.cat((torch.arange(0x60), torch.arange(0x80, 0xE0))).to(torch.uint8)  # up to 16
    for first in range(0, 192, 64):
        kv = torch.zeros(1, 1, 1, 64, 2, 64, dtype=FP8)
        kv.view(torch.uint8)[0, 0, 0, 1, 0] = kinds[first : first + 64]
        kv[0, 0, 0, 1, 1] = torch.ones(64).to(FP8)
        number = kinds[first : first + 64].view(FP8).double()
        layout, span = KVLayout(1, 1, 1, 64, 64), [QuerySpan(i, 1, 1, [0]) for i in range(64)]
        plan = each_backend.plan_attention(span, layout, heads, torch.device("cpu"))
        q = torch.eye(64, dtype=dtype)[:, None].expand(64, heads, 64).contiguous()
        out = each_backend.paged_attention(q, kv, 0, plan, AttentionRule(0.25))
        weight = torch.sigmoid(number * 0.25)[:, None, None].expand(64, heads, 64)
        tolerance = 2**-7 if dtype == torch.bfloat16 else 1e-6
        torch.testing.assert_close(out.double(), weight, rtol=tolerance, atol=tolerance)


def test_what_is_stored_is_the_nearest_number(each_backend: Any) -> None:
    """Every number, every border between two of them and what lies beside it; too large ones; NaN."""
    kinds = torch.arange(0x7F, dtype=torch.uint8).view(FP8).float()
    middle = (kinds[1:] + kinds[:-1]) / 2
    beside = torch.nextafter(middle, torch.zeros(())), torch.nextafter(middle, torch.full((), 500.0))
    large = torch.tensor([448.1, 464.0, 465.0, 1e30, float("inf")])
    numbers = torch.cat((kinds, middle, *beside, large))
    numbers = torch.nn.functional.pad(torch.cat((numbers, -numbers)), (0, -2 * len(numbers) % 64)).view(-1, 64)
    numbers[-1, -1] = float("nan")
    kv, tokens = torch.zeros(1, 1, 1, len(numbers), 2, 64, dtype=FP8), len(numbers)
    qkv, cos, sin = torch.cat((numbers,) * 3, 1), torch.ones(tokens, 32), torch.zeros(tokens, 32)
    qkv = torch.where(qkv.isinf(), torch.sign(qkv) * 3e38, qkv)  # times a sine of zero infinity would be none
    each_backend.rotate_and_write(qkv, cos, sin, kv, 0, torch.arange(tokens), None)
    expected = numbers.clamp(-448, 448).to(FP8).float()
    assert torch.equal(kv[0, 0, 0, :, 1].float().nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))
    assert torch.equal(kv[0, 0, 0, :, 0].float()[:-1], expected[:-1])
    assert kv[0, 0, 0, -1, :, -1].float().isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_stored_is_the_nearest_number_to_the_quotient(each_backend: Any, dtype: torch.dtype) -> None:
    """Bit for bit torch's division and rounding, of keys and values that no scale of the other kind touches."""
    numbers, scales = torch.randn(37, 64).to(dtype) * 30, KVScales(0.0371, 0.213)
    kv = torch.zeros(3, 2, 2, 16, 2, 64, dtype=FP8)
    qkv, cos, sin = torch.cat((numbers,) * 6, 1), torch.ones(37, 32), torch.zeros(37, 32)
    q = each_backend.rotate_and_write(qkv, cos, sin, kv, 1, torch.arange(37), None, scales)
    assert torch.equal(q, numbers[:, None].expand(37, 2, 64))
    found = kv[:, 1].float().transpose(1, 2).reshape(48, 2, 2, 64)[:37]
    for part, scale in enumerate(scales):
        expected = (numbers.float() / torch.tensor(scale)).clamp(-448, 448).to(FP8).float()
        assert 448 in expected.abs() or part == 1
        assert torch.equal(found[:, :, part], expected[:, None].expand(37, 2, 64))
    assert not kv[:, 0].float().any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "normed"), [(24, False), (64, True), (80, False)])
def test_backends_store_the_same(dim: int, normed: bool, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    """But for numbers that lie so near to a border that the last bit of the rotation decides."""
    native = native_backend() or pytest.skip("no C++ compiler here")
    heads, kv_heads, tokens = 6, 2, 37
    caches = [packed(torch.zeros(9, 3, kv_heads, 16, 2, dim), kv_dtype) for _ in range(2)]
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim).to(dtype)
    angles, slots = torch.rand(tokens, dim // 2) * 100, torch.randperm(9 * 16)[:tokens]
    norms = HeadNorms(torch.rand(dim), torch.rand(dim), 1e-6) if normed else None
    for backend, kv in zip((torch_backend, native), caches, strict=True):
        backend.rotate_and_write(qkv, angles.cos(), angles.sin(), kv, 1, slots, norms)
    codes = [(numbers_of(kv) if kv_dtype == torch.int8 else kv.view(torch.uint8)).int() for kv in caches]
    # A norm of bfloat16 is rounded by torch before it is rotated.
    allowed = 0.2 if normed and dtype == torch.bfloat16 else 0.001
    assert (codes[0] != codes[1]).float().mean() < allowed and (codes[0] != 0).any(-1).sum() == tokens * kv_heads * 2
    found, expected = (unpacked(kv) for kv in caches)
    assert (found - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_whole_number_is_read_with_its_scale(each_backend: Any, dtype: torch.dtype, rows: int) -> None:
    """As value, as the test above, and as key: of two scores the difference is theirs."""
    numbers = torch.cat((torch.arange(-127, 128), torch.zeros(1))).view(2, 128)
    wide = torch.zeros(2, 1, 2, 16, 2, 128)
    wide[1, 0, :, 0, 1], wide[1, 0, :, 1, 0] = numbers * 0.25, numbers * 2**-5
    kv = packed(wide, torch.int8)
    layout = KVLayout(2, 1, 2, 16, 128)
    plan = each_backend.plan_attention([QuerySpan(0, 1, 0, [1])], layout, 2 * rows, torch.device("cpu"))
    q = torch.zeros(1, 2 * rows, 128, dtype=dtype)
    out = each_backend.paged_attention(q, kv, 0, plan, AttentionRule(1.0))
    tolerance = 2**-8 if dtype == torch.bfloat16 else 1e-6  # a weight of 0.25 is rounded with its scale
    expected = (numbers * 0.25).view(1, 2, 1, 128).expand(1, 2, rows, 128).reshape(1, 2 * rows, 128)
    torch.testing.assert_close(out.float(), expected, rtol=tolerance, atol=0)
    spans = [QuerySpan(i, 1, 1, [1]) for i in range(128)]
    plan = each_backend.plan_attention(spans, layout, 2 * rows, torch.device("cpu"))
    q = torch.eye(128, dtype=dtype)[:, None].expand(128, 2 * rows, 128).contiguous()
    out = each_backend.paged_attention(q, kv, 0, plan, AttentionRule(1.0)).float().view(128, 2, rows, 128)
    weight = 1 - torch.sigmoid(numbers.T * 2**-5)  # of the first token's value
    expected = weight[:, :, None, None] * (numbers * 0.25)[None, :, None]
    torch.testing.assert_close(out, expected.expand_as(out), rtol=3 * tolerance, atol=3 * tolerance)


def test_rows_of_whole_numbers(each_backend: Any) -> None:
    """A scale for each key and each value; ties to even; what is not finite takes its row along, and only that."""
    x = torch.stack(
        [torch.arange(-127, 129) * 0.5, torch.randn(256) * 1e-6, torch.zeros(256), torch.full((256,), 3e38)]
    )
    x = torch.cat((x, torch.randn(6, 256)))
    x[4, 7], x[5, 9] = float("nan"), float("inf")
    kv = packed(torch.full((1, 1, 2, 16, 2, 256), 7.0), torch.int8)
    qkv = torch.cat((x, x, x, x.flip(0), x.flip(0)), 1)  # one query head, two of keys, two of values
    cos, sin = torch.ones(10, 128), torch.zeros(10, 128)
    each_backend.rotate_and_write(qkv, cos, sin, kv, 0, torch.arange(10), None)
    found = unpacked(kv)[0, 0]
    for head in range(2):
        for i in range(10):
            for row, place in ((i, 0), (9 - i, 1)):
                if row in (4, 5):
                    assert found[head, i, place].isnan().all()
                else:
                    size = x[row].abs().max()
                    assert (found[head, i, place] - x[row]).abs().max() <= size / 127 * 0.5001
        assert (found[head, 10:] == 7.0).all()
    assert not numbers_of(kv)[0, 0, 0, 2, 0].any() and not scales_of(kv)[0, 0, 0, 0, 2].any()


def test_packing_again_changes_no_number() -> None:
    kv = packed(torch.randn(3, 5, 16, 2, 64), torch.int8)
    assert kv.shape == (3, 5, 16, 2, 68) and torch.equal(numbers_of(packed(unpacked(kv), torch.int8)), numbers_of(kv))
