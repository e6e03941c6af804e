"""Small chunks behind prefixes whose keys are split, against the float64 reference; unused slots hold NaN."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.agreement.attention import SPLIT_CHUNK, attention_checks
from kernels.agreement.poisoned_cache import PoisonedCache
from kernels.backends import FOUND
from kernels.gpu import backend as triton_backend
from kernels.gpu import decode_attention, prefill_attention, query_work
from kernels.gpu.tiles import key_box

from .attention_case import attend, error
from .compiled import CHIPS
from .test_agreement import cache, latents, shape_of

pytestmark = pytest.mark.interpret
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Splits of 64 keys from 128 on; how many rows each reduction had."""
    for name, value in {"LEAST_SPLIT_TOKENS": 64, "SPLIT_STEP_TOKENS": 64, "LEAST_KEYS": 128}.items():
        monkeypatch.setattr(query_work, name, value)
    found: list[int] = []
    combine = prefill_attention.combine

    def noted(rows: Any, *rest: Any) -> None:
        found.append(len(rows))
        combine(rows, *rest)

    monkeypatch.setattr(prefill_attention, "combine", noted)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("block", [16, 64])
def test_chunks_behind_prefixes(
    make_case: Any, device: torch.device, rounds: list[int], block: int, dtype: torch.dtype
) -> None:
    """Of odd lengths, with the diagonal in one split and in two, beside spans that are not split and single rows."""
    case = make_case([(13, 250), (1, 30), (2, 126), (20, 181), (5, 13), (3, 381)], block=block, dtype=dtype)
    assert error(case, attend(case, device)) < TOLERANCE[dtype]
    assert rounds == [13 + 2 + 20 + 3]


@pytest.mark.parametrize(
    "block", [32, pytest.param(48, marks=pytest.mark.slow), pytest.param(128, marks=pytest.mark.slow)]
)
def test_block_sizes(make_case: Any, device: torch.device, rounds: list[int], block: int) -> None:
    case = make_case([(3, 129), (7, 250)], block=block, dtype=torch.float16)
    assert error(case, attend(case, device)) < 2e-3 and rounds == [10]


@pytest.mark.slow
@pytest.mark.parametrize("dim", [16, 80, 96, 128, 256])
def test_head_sizes(make_case: Any, device: torch.device, rounds: list[int], dim: int) -> None:
    case = make_case([(5, 140), (6, 201)], dim=dim, block=32, dtype=torch.float16)
    assert error(case, attend(case, device)) < 2e-3 and rounds == [11]


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (9, 3), (14, 2), (20, 1)])
def test_head_groups(make_case: Any, device: torch.device, rounds: list[int], heads: int, kv_heads: int) -> None:
    """In tiles of several tokens, the last of which is not full."""
    case = make_case([(7, 205), (2, 140)], heads=heads, kv_heads=kv_heads, dtype=torch.float16)
    assert error(case, attend(case, device)) < 2e-3 and rounds == [9]


@pytest.mark.slow
@pytest.mark.parametrize("window", [130, 200, 250])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_windows(make_case: Any, device: torch.device, rounds: list[int], window: int, dtype: torch.dtype) -> None:
    """Some rows see nothing of the first splits, some nothing of the last. Blocks and slots that a window has left
    behind may be anyone's: table entries are not followed, and NaN is not read."""
    case = make_case([(45, 345), (2, 162), (9, 130)], block=64, dtype=dtype)
    for i, span in enumerate(case.spans):
        left = max(0, span.start + 1 - window)
        gone, slots = left // 64, left % 64
        case.kv[span.block_table[gone], :, :, :slots] = float("nan")
        case.spans[i] = span._replace(block_table=[-(2**30)] * gone + list(span.block_table[gone:]))
    out = attend(case, device, window=window)
    case.kv = case.kv.nan_to_num(0.0)
    for i, span in enumerate(case.spans):
        case.spans[i] = span._replace(block_table=[max(0, block) for block in span.block_table])
    assert error(case, out, window=window) < TOLERANCE[dtype] and rounds and rounds[0] == 56


@pytest.mark.slow
def test_softcap_and_sinks(make_case: Any, device: torch.device, rounds: list[int]) -> None:
    case = make_case([(10, 133), (6, 150)])
    case.q *= 20
    sinks = torch.tensor([-3.0, 0.0, 4.0, 60.0])
    for options in ({"softcap": 5.0}, {"sinks": sinks}, {"softcap": 5.0, "sinks": sinks, "window": 129}):
        assert error(case, attend(case, device, **options), **options) < 2e-5  # scores are in the hundreds
    assert len(rounds) == 3


@pytest.mark.slow
@pytest.mark.parametrize("by_bits", [False, True])
def test_float8_cache(
    make_case: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch, rounds: list[int], by_bits: bool
) -> None:
    if by_bits:
        monkeypatch.setattr("kernels.gpu.scores.chip_of", lambda device: CHIPS[80])
    case = make_case([(20, 130), (9, 200)], block=64, dtype=torch.bfloat16)
    case.kv = case.kv.to(torch.float8_e4m3fn)
    options = {"k_scale": 0.5, "v_scale": 2.5}
    assert error(case, attend(case, device, **options), **options) < 4e-2 and rounds == [29]


@pytest.mark.slow
def test_boxes_have_the_bits_of_pointers(
    make_case: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch, rounds: list[int]
) -> None:
    case = make_case([(20, 133), (7, 250)], block=64, dtype=torch.float16)
    by_pointers = [attend(case, device, window=window) for window in (0, 150)]
    config, asked = prefill_attention.prefill_config, []
    monkeypatch.setattr(prefill_attention, "prefill_config", lambda *kind: config(*kind)._replace(boxes=True))

    def boxes(*arguments: Any) -> Any:
        asked.append(made := key_box.key_boxes(*arguments))
        return made

    monkeypatch.setattr(prefill_attention, "key_boxes", boxes)
    by_boxes = [attend(case, device, window=window) for window in (0, 150)]
    assert rounds == [27] * 4 and asked and None not in asked
    assert all(map(torch.equal, by_boxes, by_pointers)) and not by_boxes[0].isnan().any()


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "dim", "latent_dim", "block"), [(3, 56, 48, 16), (20, 80, 64, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_latents(
    make_case: Any,
    device: torch.device,
    rounds: list[int],
    heads: int,
    dim: int,
    latent_dim: int,
    block: int,
    dtype: torch.dtype,
) -> None:
    spans = [(9, 150), (1, 40), (3, 0), (4, 251)]
    case = make_case(spans, heads=heads, kv_heads=1, dim=dim, block=block, dtype=dtype, latent_dim=latent_dim)
    assert error(case, attend(case, device)) < 1.5 * TOLERANCE[dtype] and rounds == [13]


@pytest.mark.slow
@pytest.mark.parametrize("window", [0, 150])
def test_a_chunk_does_not_depend_on_its_batch(
    make_case: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch, rounds: list[int], window: int
) -> None:
    """Bit for bit: alone, among others, in another order, in rounds of its own."""
    case = make_case([(13, 250), (40, 9), (1, 327), (20, 181), (3, 140)], heads=3, kv_heads=1, dtype=torch.float16)
    spans, together = case.spans, attend(case, device, window=window)
    case.spans = spans[::-1]
    assert torch.equal(attend(case, device, window=window), together)
    for span in spans:
        case.spans = [span]
        rows = slice(span.row, span.row + span.num_rows)
        assert torch.equal(attend(case, device, window=window)[rows], together[rows])
    rounds.clear()
    monkeypatch.setattr(query_work, "MOST_PARTIALS", 1)
    case.spans = spans
    assert torch.equal(attend(case, device, window=window), together) and rounds == [13, 20, 3]


@pytest.mark.slow
def test_with_batch_invariance_a_row_does_not_depend_on_its_chunk(
    make_case: Any, device: torch.device, rounds: list[int]
) -> None:
    """Bit for bit, as one prompt or in chunks; without it a small chunk's sums have another order."""
    case = make_case([(300, 0)], heads=4, kv_heads=2, dtype=torch.float16)
    whole, queries = case.spans[0], case.q
    together = attend(case, device, batch_invariant=True)
    for first, count in [(200, 2), (263, 9), (290, 10)]:
        case.spans = [whole._replace(row=0, num_rows=count, start=first)]
        case.q = queries[first : first + count].clone()
        assert torch.equal(attend(case, device, batch_invariant=True), together[first : first + count])
    assert not rounds
    torch.testing.assert_close(attend(case, device), together[290:300], atol=2e-3, rtol=0.0)
    assert rounds == [10]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, which the interpreter computes with: NaN is the point
@pytest.mark.parametrize("kind", ["keys and values", "latents"])
@pytest.mark.parametrize("lost", [False, True])
def test_the_check_of_a_start_covers_splits(monkeypatch: pytest.MonkeyPatch, kind: str, lost: bool) -> None:
    """At their real length; it refuses a reduction that forgets the last one."""
    monkeypatch.setitem(FOUND, "cpu", triton_backend)
    combine, counts = decode_attention.combine, []

    def noted(rows: Any, splits: Any, *rest: Any) -> None:
        counts.extend(splits[:, 0].tolist())
        combine(rows, splits - torch.tensor([int(lost), 0], dtype=splits.dtype), *rest)

    monkeypatch.setattr(prefill_attention, "combine", noted)
    latent = {"latent_dim": 16, "query_dim": 20} if kind == "latents" else {}
    shape = shape_of(dtype=torch.bfloat16, **latent)
    make = latents if latent else cache
    kv = make(torch.bfloat16, size=64, num_blocks=56, **({"dim": 24} if latent else {}))
    poisoned = PoisonedCache(kv, 56, torch.Generator().manual_seed(5), shape.latent_dim)
    assert poisoned.num_tokens >= SPLIT_CHUNK
    found = [str(one) for one in (check() for check in attention_checks(shape, poisoned)) if one.problem]
    assert counts == [5] * 9
    assert [one.split(" (")[0] for one in found] == (["prefill attention"] if lost else [])
