from __future__ import annotations

import math
from collections import Counter
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from common.engine.sampling.sampler import Sampler, SamplingRow
from common.grammar.token_rules import TokenLimits
from common.wire.sampling_params import LOGPROB_FLOOR, SamplingParams
from kernels.plain.sampling import uniform as noise_of

VOCAB = 200


def uniform(seed: int, position: int) -> float:
    (noise,) = noise_of(np.array([seed], dtype=np.int64), np.array([position], dtype=np.int64))
    return float(noise)


NOISE = [0.6524484863740322, 0.7012121095215252, 0.36818951565166946, 0.15403342580516755, 0.32491307998290764]


def row(position: int = 0, *, output: tuple[int, ...] = (), prompt: tuple[int, ...] = (), **fields: Any) -> SamplingRow:
    limits = TokenLimits(fields.pop("banned", ()), fields.pop("forced", None))
    return SamplingRow(SamplingParams(max_tokens=1, **fields), position, output, prompt, limits)


def draw(logits: torch.Tensor, rows: list[SamplingRow]) -> list[int]:
    sampled = Sampler(logits.shape[-1]).sample(logits.expand(len(rows), -1), rows)
    return [token.token_id for token in sampled]


def support(logits: torch.Tensor, **fields: Any) -> set[int]:
    """Every token that 2,000 draws bring up."""
    return set(draw(logits, [row(i, **fields) for i in range(2000)]))


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(3)) * 2


@pytest.mark.parametrize(("temperature", "seed"), [(1.0, 0), (0.5, -7), (2.0, 2**63 - 1)])
def test_frequencies_follow_softmax(logits: torch.Tensor, temperature: float, seed: int) -> None:
    """Chi-square over tokens expected five times or more: mean = degrees of freedom, deviation = sqrt(2 * mean)."""
    count = 20_000
    rows = [row(i, temperature=temperature, seed=seed) for i in range(count)]
    found = Counter(draw(logits, rows))
    expected = (torch.softmax(logits / temperature, -1) * count).tolist()
    likely = [i for i in range(VOCAB) if expected[i] >= 5]
    chi = sum((found[i] - expected[i]) ** 2 / expected[i] for i in likely)
    assert abs(chi - len(likely)) < 5 * math.sqrt(2 * len(likely))


def test_seeds_are_independent_streams(logits: torch.Tensor) -> None:
    """Neighbouring seeds at one position are as random as neighbouring positions of one seed."""
    values = [uniform(seed, 17) for seed in range(10_000)] + [uniform(5, position) for position in range(10_000)]
    counts = Counter(int(value * 20) for value in values)
    assert sum((counts[i] - 1000) ** 2 / 1000 for i in range(20)) < 50
    pairs = Counter(
        (uniform(seed, 0) > 0.5, uniform(seed + 1, 0) > 0.5, uniform(seed, 1) > 0.5) for seed in range(8000)
    )
    assert all(850 < pairs[key] < 1150 for key in pairs) and len(pairs) == 8


def test_noise_is_fixed_for_ever() -> None:
    """A request that moves to another version of a worker must go on with the same noise."""
    assert [uniform(*at) for at in [(0, 0), (0, 1), (1, 0), (-1, 5), (2**63 - 1, 2**20)]] == NOISE


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = torch.zeros(50_000)
    logits[[77, 40_000, 49_999]] = 3.0
    assert draw(logits, [row(temperature=0.0)]) == [77]


def test_greedy_is_argmax(logits: torch.Tensor) -> None:
    assert draw(logits, [row(temperature=0.0, seed=i) for i in range(3)]) == [int(logits.argmax())] * 3


def test_top_k(logits: torch.Tensor) -> None:
    assert support(logits, top_k=5) == set(torch.topk(logits, 5).indices.tolist())
    assert support(logits, top_k=1) == {int(logits.argmax())}


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.8])
def test_top_p_is_the_smallest_set_that_holds_it(logits: torch.Tensor, top_p: float) -> None:
    probs, order = torch.softmax(logits, -1).sort(descending=True)
    size = int((probs.cumsum(0) < top_p).sum()) + 1
    assert support(logits, top_p=top_p) == set(order[:size].tolist())


def test_top_p_keeps_equals_together() -> None:
    assert support(torch.zeros(8), top_p=0.3) == set(range(8))


def test_min_p(logits: torch.Tensor) -> None:
    probs = torch.softmax(logits, -1)
    assert support(logits, min_p=0.3) == set(torch.nonzero(probs >= 0.3 * probs.max()).flatten().tolist())


def test_filters_compose(logits: torch.Tensor) -> None:
    found = support(logits, top_k=10, top_p=0.7, min_p=0.01, temperature=1.5)
    assert found < set(torch.topk(logits, 10).indices.tolist()) and len(found) > 2


def test_banned_tokens_never_come(logits: torch.Tensor) -> None:
    best = torch.topk(logits, 3).indices.tolist()
    assert not set(best) & support(logits, banned=tuple(best))
    assert draw(logits, [row(temperature=0.0, banned=(best[0],))]) == [best[1]]


def test_logit_bias(logits: torch.Tensor) -> None:
    assert draw(logits, [row(temperature=0.0, logit_bias=((5, 100.0),))]) == [5]
    assert 5 not in support(logits, logit_bias=((5, -100.0),))
    assert draw(logits, [row(temperature=0.0, logit_bias=((VOCAB + 5, 100.0),))]) == [int(logits.argmax())]


def test_presence_and_frequency_count_output_only() -> None:
    logits = torch.tensor([3.0, 2.5, 2.0, 0.0])
    assert draw(logits, [row(temperature=0.0, presence_penalty=0.6, prompt=(0,))]) == [0]
    assert draw(logits, [row(temperature=0.0, presence_penalty=0.6, output=(0, 0))]) == [1]
    assert draw(logits, [row(temperature=0.0, frequency_penalty=0.4, output=(0,))]) == [0]
    assert draw(logits, [row(temperature=0.0, frequency_penalty=0.4, output=(0, 0, 1, 1))]) == [0]
    assert draw(logits, [row(temperature=0.0, frequency_penalty=0.7, output=(0, 0, 1))]) == [2]


def test_repetition_counts_the_prompt_too() -> None:
    logits = torch.tensor([3.0, 2.0, -1.0, -1.1])
    assert draw(logits, [row(temperature=0.0, repetition_penalty=2.0, prompt=(0,))]) == [1]
    assert draw(logits, [row(temperature=0.0, repetition_penalty=0.1, prompt=(2,), output=(1,))]) == [1]
    assert draw(logits[2:], [row(temperature=0.0, repetition_penalty=2.0, prompt=(0, 0))]) == [1]


def test_a_row_does_not_depend_on_the_others() -> None:
    logits = torch.randn(33, 49_152, generator=torch.Generator().manual_seed(0)) * 3
    fields: list[dict[str, Any]] = [
        {},
        {"top_p": 0.9},
        {"top_k": 40, "temperature": 0.7},
        {"min_p": 0.05},
        {"temperature": 0.0},
        {"repetition_penalty": 1.3, "prompt": (4, 5)},
    ]
    rows = [row(i, seed=i, logprobs=3, **fields[i % len(fields)]) for i in range(33)]
    sampler = Sampler(49_152)
    together = sampler.sample(logits, rows)
    assert [sampler.sample(logits[i : i + 1], rows[i : i + 1])[0] for i in range(33)] == together
    assert sampler.sample(logits.flip(0), rows[::-1])[::-1] == together


def test_logits_are_left_alone(logits: torch.Tensor) -> None:
    before = logits.clone()
    draw(logits, [row(top_p=0.5, top_k=3, presence_penalty=1.0, output=(1,), banned=(2,), logit_bias=((0, 1.0),))])
    assert torch.equal(logits, before)


def test_logprobs_are_of_the_raw_logits(logits: torch.Tensor) -> None:
    (token,) = Sampler(VOCAB).sample(logits[None], [row(temperature=0.3, top_k=1, logprobs=4, logit_bias=((3, 50.0),))])
    expected = torch.log_softmax(logits.double(), -1)
    assert token.token_id == 3 and token.logprobs is not None
    assert token.logprobs.logprob == pytest.approx(float(expected[3]), abs=1e-5)
    best = torch.topk(expected, 4)
    assert [i for i, _ in token.logprobs.top] == best.indices.tolist()
    assert [p for _, p in token.logprobs.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_logprobs_order_equals_by_id_and_have_a_floor() -> None:
    logits = torch.full((1, 30), -torch.inf)
    logits[0, [4, 9, 20]] = 1.0
    (token,) = Sampler(30).sample(logits, [row(temperature=0.0, logprobs=5)])
    assert token.logprobs is not None
    assert [i for i, _ in token.logprobs.top] == [4, 9, 20, 0, 1]
    assert token.logprobs.top[-1][1] == LOGPROB_FLOOR


def test_no_alternatives(logits: torch.Tensor) -> None:
    (token,) = Sampler(VOCAB).sample(logits[None], [row(logprobs=0)])
    assert token.logprobs is not None and token.logprobs.top == ()


def test_wrong_shape(logits: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"\[1, 200\], must be \[2, 200\]"):
        Sampler(VOCAB).sample(logits[None], [row(), row()])


def test_no_rows() -> None:
    assert Sampler(7).sample(torch.empty(0, 7), []) == []


def test_launched_rows_get_the_same_tokens(logits: torch.Tensor) -> None:
    filters: list[dict[str, Any]] = [
        {},
        {"top_k": 7},
        {"top_p": 0.8},
        {"min_p": 0.1, "top_k": 20},
        {"temperature": 0.0},
    ]
    rows = [row(i, seed=i % 5, **filters[i % len(filters)]) for i in range(200)]
    sampler = Sampler(VOCAB)
    many = logits + torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(4))
    launched = sampler.launch(many, sampler.prepare(rows))
    assert launched.ids.tolist() == [token.token_id for token in sampler.sample(many, rows)]
    greedy = sampler.prepare([row(temperature=0.0)] * 3)
    assert sampler.launch(many[:3], greedy).ids.tolist() == many[:3].argmax(-1).tolist()


class OnGPU(torch.Tensor):
    """A tensor of the CPU that says it is on a GPU."""

    device = torch.device("cuda")  # type: ignore[assignment]


def test_a_greedy_batch_on_a_gpu_is_drawn_where_a_nan_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.argmax takes a NaN for the largest logit: its place would be a token."""
    drawn: list[int] = []

    def draw_all(logits: torch.Tensor, rows: Any, allowed: Any) -> torch.Tensor:
        drawn.append(len(logits))
        return torch.full((len(logits),), VOCAB)

    monkeypatch.setattr("common.engine.sampling.sampler.sample", draw_all)
    monkeypatch.setattr("common.engine.sampling.sampler.on_device", lambda device: nullcontext())
    monkeypatch.setattr("common.engine.sampling.sampler.SamplingTensors.pack", lambda draws, device: draws)
    logits = torch.full((3, VOCAB), math.nan).as_subclass(OnGPU)
    sampler = Sampler(VOCAB)
    assert [token.token_id for token in sampler.sample(logits, [row(temperature=0.0)] * 3)] == [VOCAB] * 3
    assert drawn == [3]


def test_logits_that_are_no_numbers_give_no_token_and_spoil_no_other() -> None:
    """The request that asked for it ends: an id that is no token has no log-probability."""
    logits = torch.randn(2, VOCAB)
    logits[0] = math.nan
    spoilt, good = Sampler(VOCAB).sample(logits, [row(logprobs=1), row(logprobs=1)])
    assert spoilt.token_id >= VOCAB and spoilt.logprobs is None
    assert good.token_id < VOCAB and good.logprobs is not None


@pytest.mark.gpu
def test_a_gpu_samples_the_same_tokens(logits: torch.Tensor) -> None:
    fields: list[dict[str, Any]] = [{}, {"top_k": 7, "top_p": 0.9}, {"temperature": 0}, {"presence_penalty": 1.0}]
    rows = [row(i, seed=i, output=(3, 5), **fields[i % len(fields)]) for i in range(80)]
    many = logits + torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(4))
    expected, found = (Sampler(VOCAB).sample(where, rows) for where in (many, many.cuda()))
    assert found == expected
