"""The whole model through the Triton backend, and how it is chosen."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from common.engine.kv.cache import SMALL_DTYPES
from common.engine.models.batch import SequenceChunk
from common.model_files.tiny import make_tiny_model
from common.wire.sampling_params import SamplingParams
from kernels import KVScales
from kernels.backends import FOUND, backend, look_up
from kernels.gpu import backend as triton_backend
from kernels.plain import backend as torch_backend

from ...common.engine.models.generation import (
    Pool,
    load,
    prompt,
    random_checkpoint,
    transformers_greedy,
    transformers_model,
)
from ...common.engine.weights.formats.kv_scaled import scales_of_layers
from ...families import CASES
from ...oracle import Oracle, generate
from ...stand_in import StandIn
from .conftest import ON_GPU

OPERATIONS = ("add_rms_norm", "gated", "paged_attention", "plan_attention", "rms_norm", "rotate_and_write")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Every operation of the model goes to Triton's backend and is counted."""
    counted: Counter[str] = Counter()

    def counting(name: str) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            counted[name] += 1
            return getattr(triton_backend, name)(*arguments, **named)

        return call

    chosen = {name: counting(name) for name in (*OPERATIONS, "write_latents")}
    monkeypatch.setitem(FOUND, "cpu", StandIn(torch_backend, **chosen))
    return counted


@pytest.mark.slow
@pytest.mark.interpret
@pytest.mark.skipif(ON_GPU, reason="the tensors are the CPU's")
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_the_oracles_tokens(tmp_path: Path, calls: Counter[str], architecture: Literal["llama", "gemma3"]) -> None:
    """Prefill in chunks, decode steps of a lone sequence and of mixed batches; Gemma's window is 32 tokens."""
    model = load(make_tiny_model(tmp_path / "model", architecture=architecture))
    prompts = [prompt(37, seed=1), prompt(5, seed=2)]
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    expected = [generate(model, tokens, params) for tokens in prompts]
    assert Pool(model).greedy_batch(prompts, 4, chunk=24) == expected
    assert set(calls) == set(OPERATIONS)


@pytest.mark.slow
@pytest.mark.interpret
@pytest.mark.skipif(ON_GPU, reason="the tensors are the CPU's")
@pytest.mark.parametrize("name", ["deepseek-v2", "deepseek-v3"])
def test_latents(tmp_path: Path, calls: Counter[str], name: str) -> None:
    """The tokens of transformers: a prompt in chunks, then single rows."""
    family, options = CASES[name]
    folder = random_checkpoint(tmp_path, family, **options)
    tokens, _ = transformers_greedy(transformers_model(folder), prompt(21), 3)
    assert Pool(load(folder)).greedy(prompt(21), 3, chunk=12) == tokens
    assert set(calls) == {*OPERATIONS, "write_latents"} - {"rotate_and_write"}


@pytest.mark.slow
@pytest.mark.interpret
@pytest.mark.skipif(ON_GPU, reason="the tensors are the CPU's")
@pytest.mark.parametrize("scales", [(), scales_of_layers(4)])
def test_a_cache_of_8_bits(tmp_path: Path, calls: Counter[str], scales: tuple[KVScales, ...]) -> None:
    """Logits of a prefill in chunks and of steps after it, but for numbers near to a border between two of 8 bits."""
    model, tokens = load(make_tiny_model(tmp_path / "model")), prompt(40)
    pool, exact, oracle = (
        Pool(model, kv_dtype=SMALL_DTYPES["fp8"], kv_scales=scales),
        Oracle(model),
        Oracle(model, kv_dtype=SMALL_DTYPES["fp8"], kv_scales=scales),
    )
    table = pool.table(len(tokens))
    rows = [pool.runner.forward([SequenceChunk(tokens[:20], 0, table, all_logits=True)])]
    rows += [pool.runner.forward([SequenceChunk(tokens[20:38], 20, table, all_logits=True)])]
    rows += [pool.runner.forward([SequenceChunk(tokens[i : i + 1], i, table)]) for i in (38, 39)]
    expected, unrounded = (one.forward(tokens, one.empty_cache()) for one in (oracle, exact))
    assert (torch.cat(rows) - expected).norm() < 0.1 * (unrounded - expected).norm()
    assert set(calls) == set(OPERATIONS)


def test_cuda_takes_triton() -> None:
    assert backend("cuda") is triton_backend and backend("xpu") is torch_backend


def test_without_triton_it_is_torch_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "kernels.gpu.backend", None)
    with caplog.at_level(logging.WARNING):
        found = look_up("cuda")
    assert found is torch_backend and "plain torch" in caplog.text


def test_without_a_c_compiler_too(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Triton builds its launchers with one, when the first kernel is launched."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    with caplog.at_level(logging.WARNING):
        found = look_up("cuda")
    assert found is torch_backend and "missing a C compiler" in caplog.text
    monkeypatch.setenv("CC", "cc-of-mine")
    assert look_up("cuda") is triton_backend
