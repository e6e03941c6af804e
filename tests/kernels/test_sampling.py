from __future__ import annotations

import numpy as np
import pytest
import torch

from diptych.common.model.sampler import Sampler, SamplingRow
from diptych.common.model.sampler import uniform as one_uniform
from diptych.common.sampling_params import SamplingParams
from diptych.kernels import Draw, SamplingTensors, sample
from diptych.kernels.sampling import uniform

CPU = torch.device("cpu")


def test_the_noise_is_the_samplers() -> None:
    at = [(0, 0), (0, 1), (1, 0), (-1, 5), (2**63 - 1, 2**20), (-(2**63), 7)]
    seed, position = (np.array(column, dtype=np.int64) for column in zip(*at, strict=True))
    assert uniform(seed, position).tolist() == [one_uniform(*each) for each in at]


def test_the_samplers_tokens() -> None:
    kinds: list[dict[str, float]] = [
        {"temperature": 0.0},
        {},
        {"top_k": 3},
        {"top_p": 0.6},
        {"min_p": 0.2},
        {"temperature": 1.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
        {"top_p": 1e-9},
    ]
    draws = [Draw(**{"temperature": 1.0, **kinds[i % 7]}, seed=i - 9, position=3 * i) for i in range(70)]
    logits = torch.randn(70, 333, generator=torch.Generator().manual_seed(0)) * 2
    rows = []
    for draw in draws:
        fields = draw._asdict()
        position = fields.pop("position")
        rows.append(SamplingRow(SamplingParams(max_tokens=1, **fields), position))
    expected = [token.token_id for token in Sampler(333).sample(logits, rows)]
    assert sample(logits, SamplingTensors.pack(draws, CPU)).tolist() == expected


def test_nothing() -> None:
    assert sample(torch.empty(0, 9), SamplingTensors.pack([], CPU)).tolist() == []


@pytest.mark.parametrize("draw", [Draw(-1.0), Draw(1.0, top_p=0.0)])
def test_draws_that_make_no_sense(draw: Draw) -> None:
    with pytest.raises(ValueError, match="at least 0"):
        SamplingTensors.pack([draw], CPU)
