from __future__ import annotations

from typing import Any

import pytest
import torch

from common.engine.sampling.sampler import Sampler, SamplingRow
from common.wire.sampling_params import SamplingParams
from kernels import Draw, SamplingTensors
from kernels.gpu.sampling import MAX_BLOCK, MAX_VOCAB, sample

pytestmark = pytest.mark.interpret
FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.3},
    {"temperature": 1e-4},
    {"temperature": 100.0},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 10**6},
    {"top_p": 1e-9},
    {"top_p": 0.5},
    {"top_p": 0.95, "temperature": 2.0},
    {"top_p": 0.999999},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"min_p": -0.0},
    {"min_p": 0.02, "top_k": 20, "top_p": 0.9, "temperature": 1.3},
    {"min_p": 0.3, "top_k": 50},
    {"top_k": 40, "top_p": 0.8},
    {"min_p": 1e-3, "top_p": 0.7},
]


def expect(logits: torch.Tensor, draws: list[Draw]) -> list[int]:
    rows = []
    for draw in draws:
        fields = draw._asdict()
        position = fields.pop("position")
        rows.append(SamplingRow(SamplingParams(max_tokens=1, **fields), position))
    return [token.token_id for token in Sampler(logits.shape[1]).sample(logits, rows)]


def found(logits: torch.Tensor, draws: list[Draw], device: torch.device) -> list[int]:
    tokens = sample(logits.to(device), SamplingTensors.pack(draws, device))
    assert tokens.dtype == torch.int64 and tokens.device == device
    return tokens.tolist()


def mixed(count: int) -> list[Draw]:
    """Draws of all kinds, side by side."""
    fields = [{"temperature": 1.0, **FILTERS[i % len(FILTERS)]} for i in range(count)]
    return [Draw(**field, seed=97 * i - 300, position=i * i) for i, field in enumerate(fields)]


@pytest.mark.slow
@pytest.mark.parametrize("vocab", [63, 500, MAX_BLOCK + 80])
def test_the_samplers_tokens(device: torch.device, vocab: int) -> None:
    draws = mixed(2 * len(FILTERS))
    logits = torch.randn(len(draws), vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    assert found(logits, draws, device) == expect(logits, draws)


@pytest.mark.slow
def test_a_flat_distribution(device: torch.device) -> None:
    """Nothing to leave out beforehand: the threshold is searched among all tokens."""
    draws = mixed(len(FILTERS))
    logits = torch.randn(len(draws), MAX_BLOCK + 900, generator=torch.Generator().manual_seed(1)) * 0.01
    assert found(logits, draws, device) == expect(logits, draws)


@pytest.mark.slow
def test_equals_stay_or_go_together(device: torch.device) -> None:
    draws = mixed(2 * len(FILTERS))
    logits = torch.randint(-2, 3, (len(draws), 300), generator=torch.Generator().manual_seed(2)).float()
    assert found(logits, draws, device) == expect(logits, draws)
    zeros = [Draw(1.0, top_p=0.3, position=i) for i in range(40)]
    assert set(found(torch.zeros(40, 8), zeros, device)) == set(range(8))


def test_greedy_takes_the_lowest_of_equals(device: torch.device) -> None:
    logits = torch.zeros(2, 2 * MAX_BLOCK)
    logits[0, [77, MAX_BLOCK + 1, 2 * MAX_BLOCK - 1]] = 3.0
    assert found(logits, [Draw(), Draw()], device) == [77, 0]


@pytest.mark.slow
def test_one_possible_token(device: torch.device) -> None:
    """All the others at minus infinity: that one, whatever the filters."""
    draws = mixed(len(FILTERS))
    logits = torch.full((len(draws), 130), float("-inf"))
    logits[:, 65] = -5.0
    assert found(logits, draws, device) == [65] * len(draws)


@pytest.mark.slow
def test_infinite_logits(device: torch.device) -> None:
    """One that is infinitely likely comes; where none can come, what comes is no token."""
    draws = mixed(len(FILTERS))
    logits = torch.randn(len(draws), 130)
    logits[:, 65] = float("inf")
    assert found(logits, draws, device) == [65] * len(draws)
    assert all(token >= 130 for token in found(torch.full((len(draws), 130), float("-inf")), draws, device))


@pytest.mark.slow
def test_a_logit_that_is_not_a_number_yields_no_token(device: torch.device) -> None:
    """An id outside of the vocabulary, on which the engine ends the request; the rows beside it are not touched."""
    draws = mixed(2 * len(FILTERS))
    logits = torch.randn(len(draws), 130, generator=torch.Generator().manual_seed(4))
    expected = expect(logits, draws)
    logits[::3, 7], logits[1] = float("nan"), float("nan")
    tokens = found(logits, draws, device)
    for i, token in enumerate(tokens):
        assert token >= 130 if i == 1 or i % 3 == 0 else token == expected[i]


def test_banned_tokens_never_come(device: torch.device) -> None:
    draws = mixed(len(FILTERS))
    logits = torch.randn(len(draws), 200, generator=torch.Generator().manual_seed(3))
    logits[:, ::2] = float("-inf")
    tokens = found(logits, draws, device)
    assert tokens == expect(logits, draws) and all(token % 2 for token in tokens)


@pytest.mark.slow
def test_a_row_does_not_depend_on_the_others(device: torch.device) -> None:
    draws = mixed(len(FILTERS))[::2]
    logits = torch.randn(len(draws), 1000)
    together = found(logits, draws, device)
    assert [found(logits[i : i + 1], draws[i : i + 1], device)[0] for i in range(len(draws))] == together
    assert found(logits.flip(0), draws[::-1], device)[::-1] == together


@pytest.mark.slow
def test_rows_with_gaps_and_no_rows(device: torch.device) -> None:
    wide, draws = torch.randn(6, 2, 70), mixed(6)
    assert found(wide[:, 1], draws, device) == expect(wide[:, 1], draws)
    assert found(wide[:, 1].T.contiguous().T, draws, device) == expect(wide[:, 1], draws)
    assert found(torch.empty(0, 70), [], device) == []


def test_positions_may_be_written_in_place(device: torch.device) -> None:
    logits = torch.randn(3, 90)
    draws = [Draw(1.0, seed=i, position=4) for i in range(3)]
    rows = SamplingTensors.pack(draws, device)
    rows.position.add_(1)
    assert sample(logits.to(device), rows).tolist() == expect(logits, [d._replace(position=5) for d in draws])


def test_masses_of_the_largest_vocabulary_add_up() -> None:
    assert MAX_VOCAB * 2**44 < 2**63 <= (MAX_VOCAB + 1) * 2**44
    assert MAX_VOCAB > 262_208  # the largest of today's models
