"""The oracle and the runner are two programs over the same weights; they agree with each other and with float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from common.engine.models.batch import SequenceChunk
from common.engine.models.decoder import Decoder
from common.model_files.tiny import make_tiny_model
from common.wire.sampling_params import SamplingParams

from ....oracle import Oracle, generate
from .generation import Pool, load, prompt, transformers_greedy, transformers_model


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / request.param, architecture=request.param)


@pytest.fixture(scope="module")
def model(folder: Path) -> Decoder:
    return load(folder)


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 32, "temperature": 0.0, "ignore_eos": True} | fields)


@pytest.mark.slow
def test_greedy_equals_transformers_and_the_runner(folder: Path, model: Decoder) -> None:
    tokens, _ = transformers_greedy(transformers_model(folder), prompt(70), 32)
    assert generate(model, prompt(70), params()) == tokens == Pool(model).greedy(prompt(70), 32)


def test_both_are_near_float64(model: Decoder) -> None:
    exact = Oracle(model, torch.float64)
    expected = exact.forward(prompt(150), exact.empty_cache())[-1]
    plain = Oracle(model)
    pool = Pool(model)
    found = pool.runner.forward([SequenceChunk(prompt(150), 0, pool.table(150))])[0]
    assert float((found.double() - expected).abs().max()) < 1e-4
    assert float((plain.forward(prompt(150), plain.empty_cache())[-1].double() - expected).abs().max()) < 1e-4


def test_cached_steps_equal_one_pass(model: Decoder) -> None:
    oracle = Oracle(model, torch.float64)
    whole, cache = oracle.forward(prompt(40), oracle.empty_cache()), oracle.empty_cache()
    parts = [oracle.forward(prompt(40)[i : i + 7], cache) for i in range(0, 40, 7)]
    torch.testing.assert_close(torch.cat(parts), whole)


@pytest.mark.slow
def test_sampling_repeats(model: Decoder) -> None:
    first = generate(model, prompt(20), params(temperature=1.0, seed=5))
    assert first == generate(model, prompt(20), params(temperature=1.0, seed=5))
    assert first != generate(model, prompt(20), params(temperature=1.0, seed=6))


def test_sampling_resumes_where_it_was(model: Decoder) -> None:
    """What makes a retry on another worker invisible: prompt + tokens so far continues with the same noise."""
    wanted = params(temperature=1.0, seed=9, max_tokens=24)
    whole = generate(model, prompt(20), wanted)
    rest = generate(model, prompt(20) + whole[:10], params(temperature=1.0, seed=9, max_tokens=14))
    assert rest == whole[10:]


@pytest.mark.slow
def test_ends_at_an_end_token_once_it_may(model: Decoder) -> None:
    free = generate(model, prompt(20), params())
    end = free[5]
    at = free.index(end)
    assert generate(model, prompt(20), params(ignore_eos=False), (end,)) == free[: at + 1]
    late = generate(model, prompt(20), params(ignore_eos=False, min_tokens=12), (end,))
    assert end not in late[:12] and len(late) > 12
    assert generate(model, prompt(20), params(stop_token_ids=(end,))) == free[: at + 1]
