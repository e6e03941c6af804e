"""The CPU's draw against the plain one, which sorts, in float64: the same tokens, alone and in a batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from common.engine.sampling.sampler import Sampler, SamplingRow
from common.wire.sampling_params import SamplingParams
from kernels import Draw, SamplingTensors, sample
from kernels.backends import FOUND
from kernels.plain import backend as plain_backend
from kernels.plain.reference import bits_allowed
from kernels.plain.sampling import sample_by_sorting, uniform

CPU = torch.device("cpu")
KINDS: list[dict[str, float]] = [
    {"temperature": 0.0},
    {},
    {"top_k": 3},
    {"top_p": 0.6},
    {"min_p": 0.2},
    {"temperature": 1.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    {"top_p": 1e-9},
    {"top_k": 10_000_000},
    {"top_k": 1},
    {"temperature": 1e-5},
    {"temperature": 2.0, "top_p": 0.999_999_9},
    {"min_p": 1.0},
    {"min_p": -0.0},
]


def draws_of(count: int) -> list[Draw]:
    return [Draw(**{"temperature": 1.0, **KINDS[i % len(KINDS)]}, seed=i - 9, position=3 * i) for i in range(count)]


def random_logits(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 2


@pytest.mark.parametrize(
    "width",
    [
        1,
        5,
        8,
        31,
        64,
        333,
        4097,
        pytest.param(49_152, marks=pytest.mark.slow),
        pytest.param(50_257, marks=pytest.mark.slow),
    ],
)
def test_tokens_are_those_of_the_plain_draw(width: int) -> None:
    count = 240 if width < 1000 else 48
    rows, logits = SamplingTensors.pack(draws_of(count), CPU), random_logits(count, width, seed=width)
    assert sample(logits, rows).tolist() == sample_by_sorting(logits, rows).tolist()


@pytest.mark.parametrize("scale", [0.0, 1e-3, 30.0])
def test_flat_and_steep_distributions(scale: float) -> None:
    """All of equal probability, which stay or go together; and nearly all of the mass in a token."""
    rows, logits = SamplingTensors.pack(draws_of(96), CPU), random_logits(96, 1000) * scale
    assert sample(logits, rows).tolist() == sample_by_sorting(logits, rows).tolist()


@pytest.mark.parametrize("width", [1, 40, 64, 333])
def test_only_what_is_allowed_comes(width: int) -> None:
    """Masks of a word and of part of one, full and nearly empty; some rows have none."""
    random = np.random.default_rng(width)
    count = 120
    logits, masks = random_logits(count, width), list[torch.Tensor | None]()
    for i in range(count):
        words = random.integers(-(2**31), 2**31, size=-(-width // 32), dtype=np.int64).astype(np.int32)
        words |= random.integers(-(2**31), 2**31, size=words.shape, dtype=np.int64).astype(np.int32) * (i % 3 == 1)
        words[0] |= 1
        masks.append(torch.from_numpy(words) if i % 5 else None)
    rows = SamplingTensors.pack(draws_of(count), CPU)
    masked = torch.stack(
        [row.masked_fill(~bits_allowed(mask, width), -torch.inf) for row, mask in zip(logits, masks, strict=True)]
    )
    found = sample(logits, rows, masks).tolist()
    assert found == sample_by_sorting(masked, rows).tolist()
    assert all(bool(bits_allowed(mask, width)[token]) for mask, token in zip(masks, found, strict=True))
    assert sample(list(logits), rows, masks).tolist() == found


@pytest.mark.parametrize("width", [1, 7, 16, 63, 64, 49152, 50257])
def test_the_greedy_token_is_the_first_of_the_largest(width: int) -> None:
    logits = torch.randn(5, width).round(decimals=1)  # many equals
    logits[1], logits[2, width // 2] = 0.25, float("inf")
    logits[3] = float("-inf")
    expected = [int((row == row.max()).nonzero()[0]) for row in logits]
    expected[3] = width  # nothing may come
    greedy = SamplingTensors.pack([Draw()] * 5, CPU)
    assert sample(logits, greedy).tolist() == expected
    logits[4, width - 1] = float("nan")
    assert sample(logits, greedy).tolist() == [*expected[:4], width]


@pytest.mark.parametrize("draw", [Draw(), Draw(1.0), Draw(1.0, top_k=2), Draw(1.0, top_p=0.5), Draw(0.5, min_p=0.1)])
@pytest.mark.parametrize("by_sorting", [False, True])
def test_what_is_no_number_or_not_allowed_is_no_token(draw: Draw, by_sorting: bool) -> None:
    logits = random_logits(3, 70)
    logits[0, 69], logits[1] = float("nan"), -torch.inf
    rows = SamplingTensors.pack([draw] * 3, CPU)
    spoilt, forbidden, good = (sample_by_sorting if by_sorting else sample)(logits, rows).tolist()
    assert spoilt >= 70 and forbidden == 70 and good < 70
    nothing = torch.zeros(3, dtype=torch.int32)
    assert sample(logits, rows, [nothing, None, None]).tolist() == [70, 70, good]


def test_a_row_depends_on_nothing_but_itself() -> None:
    logits, draws = random_logits(48, 5000), draws_of(48)
    together = sample(logits, SamplingTensors.pack(draws, CPU)).tolist()
    for i, draw in enumerate(draws):
        assert sample(logits[i : i + 1], SamplingTensors.pack([draw], CPU)).tolist() == [together[i]]
    for threads in (1, 2, 3):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            assert sample(logits, SamplingTensors.pack(draws, CPU)).tolist() == together
        finally:
            torch.set_num_threads(before)


def test_the_noise_of_the_native_draw_is_that_of_numpy() -> None:
    """Of two tokens of equal probability the noise alone decides."""
    rng = np.random.default_rng(0)
    seeds, positions = rng.integers(-(2**63), 2**63, 500), rng.integers(0, 2**40, 500)
    rows = SamplingTensors.pack(
        [Draw(1.0, seed=int(s), position=int(p)) for s, p in zip(seeds, positions, strict=True)], CPU
    )
    assert sample(torch.zeros(500, 2), rows).tolist() == (uniform(seeds, positions) >= 0.5).astype(int).tolist()


def test_without_a_compiler_the_samplers_tokens_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        SamplingRow(SamplingParams(max_tokens=1, seed=i, top_p=1.0 - i % 2 / 10, presence_penalty=i % 3 / 2), i, (3,))
        for i in range(40)
    ]
    logits = random_logits(40, 333)
    found = Sampler(333).sample(logits, rows)
    monkeypatch.setitem(FOUND, "cpu", plain_backend)
    assert Sampler(333).sample(logits, rows) == found


def test_nothing() -> None:
    assert sample(torch.empty(0, 9), SamplingTensors.pack([], CPU)).tolist() == []


@pytest.mark.parametrize("draw", [Draw(-1.0), Draw(1.0, top_p=0.0)])
def test_draws_that_make_no_sense(draw: Draw) -> None:
    with pytest.raises(ValueError, match="at least 0"):
        SamplingTensors.pack([draw], CPU)
