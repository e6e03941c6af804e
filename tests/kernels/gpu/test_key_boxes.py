"""Prefill attention whose keys and values come by boxes, beside that by pointers: the same bits, and who refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from kernels.agreement.attention import attention_checks
from kernels.agreement.poisoned_cache import PoisonedCache
from kernels.backends import FOUND
from kernels.gpu import backend as triton_backend
from kernels.gpu import prefill_attention
from kernels.gpu.tiles import key_box
from kernels.gpu.tiles.chip import Chip
from kernels.gpu.tiles.key_box import refusal

from .attention_case import attend, error
from .compiled import CHIPS
from .test_agreement import cache, shape_of

pytestmark = pytest.mark.interpret
attend_box, key_boxes, prefill_config = key_box.attend_box, key_box.key_boxes, prefill_attention.prefill_config
TMA = CHIPS[90]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Boxes are asked for; whether each launch got them."""
    found: list[bool] = []

    def noted(*arguments: Any) -> Any:
        boxes = key_boxes(*arguments)
        found.append(boxes is not None)
        return boxes

    monkeypatch.setattr(prefill_attention, "key_boxes", noted)
    monkeypatch.setattr(prefill_attention, "prefill_config", lambda *kind: prefill_config(*kind)._replace(boxes=True))
    yield found


def same_bits(case: Any, device: torch.device, made: list[bool], **options: Any) -> torch.Tensor:
    """The output by boxes, equal to that by pointers."""
    made.clear()
    by_boxes = attend(case, device, **options)
    assert made == [True]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefill_attention, "key_boxes", lambda *_: None)
        by_pointers = attend(case, device, **options)
    assert not by_boxes.isnan().any() and torch.equal(by_boxes, by_pointers)
    return by_boxes


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("block", [64, 128])
def test_prefixes_and_odd_lengths(
    make_case: Any, device: torch.device, made: list[bool], block: int, dtype: torch.dtype
) -> None:
    case = make_case([(13, 5), (64, 64), (2, 62), (70, 131), (1, 30)], block=block, dtype=dtype)
    assert error(case, same_bits(case, device, made)) < 2e-2


@pytest.mark.slow
@pytest.mark.parametrize("dim", [16, 80, 96, 128, 256])
def test_head_sizes(make_case: Any, device: torch.device, made: list[bool], dim: int) -> None:
    """A box of 80 or 96 numbers is 128 wide: what lies beyond are the values, and must be zero."""
    case = make_case([(5, 18), (66, 3)], dim=dim, block=64, dtype=torch.float16)
    assert error(case, same_bits(case, device, made)) < 2e-3


@pytest.mark.parametrize(
    ("heads", "kv_heads"),
    [
        (1, 1),
        pytest.param(9, 3, marks=pytest.mark.slow),
        pytest.param(14, 2, marks=pytest.mark.slow),
        pytest.param(20, 1, marks=pytest.mark.slow),
    ],
)
def test_head_groups(make_case: Any, device: torch.device, made: list[bool], heads: int, kv_heads: int) -> None:
    case = make_case([(18, 5), (50, 0)], heads=heads, kv_heads=kv_heads, block=64, dtype=torch.float16)
    assert error(case, same_bits(case, device, made)) < 2e-3


@pytest.mark.parametrize(
    "window",
    [
        pytest.param(1, marks=pytest.mark.slow),
        pytest.param(7, marks=pytest.mark.slow),
        pytest.param(64, marks=pytest.mark.slow),
        pytest.param(65, marks=pytest.mark.slow),
        500,
    ],
)
def test_windows(make_case: Any, device: torch.device, made: list[bool], window: int) -> None:
    """Blocks that a window has left behind are not read; slots before it, in a block that it has not, may hold NaN."""
    case = make_case([(83, 140), (2, 62), (9, 0)], block=64, dtype=torch.float16)
    for i, span in enumerate(case.spans):
        left = max(0, span.start + 1 - window)
        gone, slots = left // 64, left % 64
        case.kv[span.block_table[gone], :, :, :slots] = float("nan")
        case.spans[i] = span._replace(block_table=[-(2**30)] * gone + list(span.block_table[gone:]))
    same_bits(case, device, made, window=window)


@pytest.mark.slow
def test_softcap_and_sinks(make_case: Any, device: torch.device, made: list[bool]) -> None:
    case = make_case([(20, 33), (6, 0)], block=16)
    case.q *= 20
    sinks = torch.tensor([-3.0, 0.0, 4.0, 60.0])
    for options in ({"softcap": 5.0}, {"sinks": sinks}, {"softcap": 5.0, "sinks": sinks, "window": 17}):
        assert error(case, same_bits(case, device, made, **options), **options) < 2e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_float8_cache(make_case: Any, device: torch.device, made: list[bool], dtype: torch.dtype) -> None:
    case = make_case([(20, 30), (9, 0)], block=64, dtype=dtype)
    case.kv = case.kv.to(torch.float8_e4m3fn)
    options = {"k_scale": 0.5, "v_scale": 2.5}
    assert error(case, same_bits(case, device, made, **options), **options) < 4e-2


def test_blocks_of_less_than_a_tile_go_by_pointers(make_case: Any, device: torch.device, made: list[bool]) -> None:
    case = make_case([(20, 33), (6, 0)], block=32, dtype=torch.float16)
    assert error(case, attend(case, device)) < 2e-3
    assert made == [False]


def test_a_worker_goes_by_pointers(make_case: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until a chip has shown that boxes are faster."""
    monkeypatch.setattr(prefill_attention, "key_boxes", None)  # it is not called
    case = make_case([(20, 33), (6, 0)], block=64, dtype=torch.float16)
    assert error(case, attend(case, device)) < 2e-3


@pytest.mark.parametrize(
    ("shape", "tile", "chip", "words"),
    [
        ((9, 2, 2, 64, 2, 128), 64, CHIPS[89], "no TMA, which NVIDIA's chips have from compute capability 9.0 on"),
        ((9, 2, 2, 32, 2, 128), 64, TMA, "a tile of 64 keys is not a box: it spans several blocks of 32 tokens"),
        ((9, 2, 2, 64, 2, 12), 64, TMA, "rows of 24 bytes do not begin at multiples of 16"),
        ((9, 2, 2, 64, 2, 320), 64, TMA, "a box of 64 rows of 320 numbers is longer than 256"),
        ((2**20, 32, 1, 64, 2, 8), 64, TMA, "2,147,483,648 rows are more than a coordinate of 32 bits counts"),
        ((9, 2, 2, 64, 2, 128), 64, TMA, ""),
        ((9, 2, 2, 128, 2, 80), 64, CHIPS[100], ""),
    ],
)
def test_what_tma_cannot_copy_is_refused(shape: tuple[int, ...], tile: int, chip: Chip, words: str) -> None:
    kv = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    found = refusal(kv, tile, chip)
    assert found.startswith(words) and bool(found) == bool(words)


def test_amd_has_no_tma() -> None:
    """An MI300X, whose capability is above Hopper's."""
    assert refusal(torch.empty(9, 2, 2, 64, 2, 128), 64, CHIPS["gfx942"]).startswith("no TMA on AMD")


@triton.jit
def beside(
    b_q, b_m, b_l, b_acc, boxes, i_row, p_table, start, begin, end, low, high, scale, softcap,
    BLOCK_ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    SOFTCAP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Boxes that begin a slot too late."""
    return attend_box(b_q, b_m, b_l, b_acc, boxes, i_row + 1, p_table, start, begin, end, low, high, scale, softcap,
                      BLOCK_ROWS, BLOCK_SIZE, BLOCK_D, BLOCK_N, SOFTCAP, MASKED)  # fmt: skip


@triton.jit
def values_of_nobody(
    b_q, b_m, b_l, b_acc, boxes, i_row, p_table, start, begin, end, low, high, scale, softcap,
    BLOCK_ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    SOFTCAP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Values beyond the sequence's end are multiplied, with weights of zero."""
    return attend_box(b_q, b_m, b_l, b_acc, boxes, i_row, p_table, start, begin, end + BLOCK_N, low, high, scale,
                      softcap, BLOCK_ROWS, BLOCK_SIZE, BLOCK_D, BLOCK_N, SOFTCAP, MASKED)  # fmt: skip


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, which the interpreter computes with: NaN is the point
@pytest.mark.slow_cases("beside")
@pytest.mark.parametrize("broken", [None, beside, values_of_nobody])
def test_the_check_of_a_start_is_of_the_form_that_is_used(
    monkeypatch: pytest.MonkeyPatch, made: list[bool], broken: Any
) -> None:
    monkeypatch.setitem(FOUND, "cpu", triton_backend)
    if broken:
        monkeypatch.setattr(prefill_attention, "attend_box", broken)
    shape, kv = shape_of(dtype=torch.bfloat16), cache(torch.bfloat16, size=64, num_blocks=10)
    poisoned = PoisonedCache(kv, 8, torch.Generator().manual_seed(5))
    found = [str(one) for one in (check() for check in attention_checks(shape, poisoned)) if one.problem]
    assert made and all(made)
    assert [one.split(" (")[0] for one in found] == (["prefill attention"] if broken else [])
