"""Mixtures of experts as one program, operation by operation, and a row at a time: the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from common.engine.kv.cache import KVCache
from common.engine.models.batch import SequenceChunk
from common.engine.models.decoder import Decoder
from common.engine.models.load import load_model
from common.engine.run.runner import ModelRunner
from kernels import Expert, Experts, Routing, quantise, route
from kernels.backends import FOUND
from kernels.cpu.backend import NativeBackend, native_backend
from kernels.cpu.program import Program
from kernels.plain import backend as torch_backend
from kernels.plain import reference

from .generation import files_of, prompt, random_checkpoint

KINDS = [("float32", "none"), ("bfloat16", "none"), ("float32", "int8"), ("bfloat16", "int4")]
FAMILIES = {
    "Qwen2Moe": {
        **{"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "num_hidden_layers": 2},
        "shared_expert_intermediate_size": 96,
    },
    "GptOss": {
        **{"num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 32, "sliding_window": 20},
        "num_hidden_layers": 2,
    },
}


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if native_backend() is None:
        pytest.skip("no C++ compiler here")
    place = tmp_path_factory.mktemp("experts") / request.param
    return random_checkpoint(place, request.param, **FAMILIES[request.param])


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def steps(model: Decoder) -> Tensor:
    """Logits of a prefill of two prompts, and of a step of both."""
    runner = ModelRunner(model, KVCache(model.config, 24, 16, model.dtype))
    first, second = list(range(9)), list(range(10, 14))
    prefill = runner.forward([SequenceChunk(prompt(120), 0, first), SequenceChunk((9, 8, 7), 0, second)])
    return torch.cat((prefill, runner.forward([SequenceChunk((3,), 120, first), SequenceChunk((4,), 3, second)])))


def program_of(model: Decoder) -> Program | None:
    native = native_backend()
    if model.program is None and model.dtype == torch.bfloat16 and native and not native.multiplies_bf16:
        pytest.skip("oneDNN multiplies dense bfloat16 here, which no program does")
    return model.program


@pytest.mark.quick_cover(1)
@pytest.mark.parametrize(("dtype", "quantization"), KINDS)
def test_one_program_is_bit_for_bit_the_operations(folder: Path, dtype: str, quantization: str) -> None:
    model, single = (load_model(files_of(folder), dtype=dtype, quantization=quantization) for _ in range(2))
    single.run_by_operation()
    torch.set_num_threads(2)
    replayed = steps(model)
    assert program_of(model) is not None
    assert torch.isfinite(replayed).all()
    assert torch.equal(steps(single), replayed)
    torch.set_num_threads(1)
    assert torch.equal(steps(model), replayed)


@pytest.mark.parametrize(("dtype", "quantization"), KINDS)
def test_a_row_is_the_same_in_every_batch(folder: Path, dtype: str, quantization: str) -> None:
    model = load_model(files_of(folder), dtype=dtype, quantization=quantization)
    runner = ModelRunner(model, KVCache(model.config, 64, 16, model.dtype))
    tables = [range(4 * i, 4 * i + 4) for i in range(16)]
    for i, table in enumerate(tables):
        runner.forward([SequenceChunk(prompt(1 + 3 * i, seed=i), 0, table)])
    chunks = [SequenceChunk((9 + i,), 1 + 3 * i, table) for i, table in enumerate(tables)]
    together = runner.forward(chunks)
    program_of(model)
    assert torch.equal(torch.cat([runner.forward([chunk]) for chunk in chunks]), together)


@pytest.fixture
def native() -> NativeBackend:
    return native_backend() or pytest.skip("no C++ compiler here")


def test_route_prefers_the_first_of_equals(native: NativeBackend) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, -2.0], [0.0, 0.0, 0.0, 0.0]])
    chosen, shares = route(logits, Routing(2, False))
    assert chosen.tolist() == [[1, 2], [0, 1]]
    torch.testing.assert_close(shares, torch.softmax(logits, -1).gather(1, chosen))
    _, shares = route(logits, Routing(2, True))
    torch.testing.assert_close(shares, torch.full((2, 2), 0.5))


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("activation", ["silu", "clamped_swiglu"])
def test_experts_against_float64(backend: str, activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if backend == "torch":
        monkeypatch.setitem(FOUND, "cpu", torch_backend)
    weights = [
        Expert(torch.randn(64, 48) / 5, torch.randn(48, 32) / 4, torch.randn(64), torch.randn(48)) for _ in range(4)
    ]
    x, logits = torch.randn(11, 48) * 3, torch.randn(11, 4)
    chosen, shares = route(logits, Routing(2, True))
    expected = torch.zeros(11, 48, dtype=torch.float64)
    for row in range(11):
        for number, share in zip(chosen[row].tolist(), shares[row].tolist(), strict=True):
            gate_up, down, first, second = (part.double() for part in weights[number])  # type: ignore[union-attr]
            inner = reference.gated((x[row].double() @ gate_up.T + first)[None], activation)[0]
            expected[row] += share * (inner @ down.T + second)
    found = Experts(weights, dtype=torch.float32)(x, chosen, shares, activation)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


def test_experts_that_differ_in_kind_run_one_by_one(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A program takes experts of one format and size; the others are not lost, only slower."""
    model = load_model(files_of(folder))
    layer = model.weights.layers[0].mlp.experts  # type: ignore[attr-defined]
    dense = quantise(layer.down[0].weight, 8)
    assert dense is not None
    expected = steps(model)
    other = load_model(files_of(folder))
    other.weights.layers[0].mlp.experts.down[0] = type(layer.down[0])(dense, dtype=torch.float32)  # type: ignore[attr-defined]
    with caplog.at_level("WARNING"):
        found = steps(other)
    assert other.program is None and "not alike" in caplog.text
    assert found.shape == expected.shape and torch.isfinite(found).all()
