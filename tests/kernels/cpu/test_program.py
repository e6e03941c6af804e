"""A recorded forward pass against the same operations one by one."""

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
from common.model_files.resolve import resolve_model
from common.model_files.tiny import make_tiny_model
from kernels import Linear, add_rms_norm, record, rms_norm
from kernels.cpu.backend import native_backend
from kernels.cpu.recorder import NotRecordable, ProgramRecorder

KINDS = [("float32", "none"), ("bfloat16", "none"), ("float32", "int8"), ("bfloat16", "int8"), ("bfloat16", "int4")]


@pytest.fixture(params=["llama", "gemma3"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if native_backend() is None:
        pytest.skip("no C++ compiler here")
    return make_tiny_model(tmp_path / "model", architecture=request.param)


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def steps(model: Decoder, kv_dtype: str) -> Tensor:
    """Logits of a prefill of two prompts, a chunk after it, a decode step, and a mixed step without sampling one."""
    runner = ModelRunner(model, KVCache(model.config, 24, 16, kv_dtype))
    first, second = list(range(8)), list(range(10, 14))
    results = [
        runner.forward([SequenceChunk(range(5, 75), 0, first), SequenceChunk((9, 8, 7), 0, second)]),
        runner.forward([SequenceChunk(range(40), 70, first, sample=False), SequenceChunk((4,), 3, second)]),
        runner.forward([SequenceChunk((3,), 110, first), SequenceChunk((4,), 4, second)]),
    ]
    return torch.cat(results)


@pytest.mark.quick_cover(2)
@pytest.mark.parametrize(("dtype", "quantization"), KINDS)
@pytest.mark.parametrize("kv_dtype", ["", "fp8", "int8"])
def test_bit_for_bit_as_the_operations_one_by_one(folder: Path, dtype: str, quantization: str, kv_dtype: str) -> None:
    model = load_model(resolve_model(str(folder)), dtype=dtype, quantization=quantization)
    replayed = steps(model, kv_dtype or dtype)
    native = native_backend()
    assert native is not None  # else there is no folder
    if model.program is None and dtype == "bfloat16" and not native.multiplies_bf16:
        pytest.skip("oneDNN multiplies dense bfloat16 here, which no program does")
    assert model.program is not None
    single = load_model(resolve_model(str(folder)), dtype=dtype, quantization=quantization)
    single.run_by_operation()
    assert torch.equal(steps(single, kv_dtype or dtype), replayed)


@pytest.mark.quick_cover(1)
@pytest.mark.parametrize(("dtype", "quantization"), KINDS)
def test_hidden_states_bit_for_bit_as_the_operations_one_by_one(folder: Path, dtype: str, quantization: str) -> None:
    """The result has a buffer of its own, with room for the sampled rows alone."""
    options = {"dtype": dtype, "quantization": quantization, "with_head": False}
    model, single = (load_model(resolve_model(str(folder)), **options) for _ in range(2))  # type: ignore[arg-type]
    single.run_by_operation()
    replayed = steps(model, dtype)
    assert replayed.dtype == torch.float32 and replayed.shape[1] == model.config.hidden_size
    assert torch.equal(steps(single, dtype), replayed)
    if dtype == "float32" and quantization == "none":
        assert model.program is not None
        whole = load_model(resolve_model(str(folder)), dtype=dtype)
        head = whole.weights.lm_head
        assert head is not None and torch.allclose(head(replayed), steps(whole, dtype), atol=1e-4)


def test_a_program_serves_caches_of_all_types(folder: Path) -> None:
    model = load_model(resolve_model(str(folder)))
    first, again = ([steps(model, kv_dtype) for kv_dtype in ("float32", "fp8", "int8")] for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    assert len({float(logits.double().sum()) for logits in first}) == 3


def decode_steps(model: Decoder, batch: int) -> tuple[Tensor, Tensor]:
    """Logits of one step of `batch` sequences of all lengths, together and one by one."""
    blocks = 4
    runner = ModelRunner(model, KVCache(model.config, batch * blocks, 16, model.dtype))
    tables = [range(i * blocks, (i + 1) * blocks) for i in range(batch)]
    lengths = [1 + 7 * i % 50 for i in range(batch)]
    for i, (table, length) in enumerate(zip(tables, lengths, strict=True)):
        runner.forward([SequenceChunk([(i + j) % 250 for j in range(length)], 0, table)])
    steps = [SequenceChunk((9 + i,), length, tables[i]) for i, length in enumerate(lengths)]
    return runner.forward(steps), torch.cat([runner.forward([step]) for step in steps])


@pytest.mark.quick_cover(2)
@pytest.mark.slow_cases("llama-40-bfloat16-none", "gemma3-20-bfloat16-none", "gemma3-40-bfloat16-none")
@pytest.mark.parametrize(("dtype", "quantization"), KINDS)
@pytest.mark.parametrize("batch", [5, 20, 40])
def test_a_step_of_many_is_that_of_each(folder: Path, dtype: str, quantization: str, batch: int) -> None:
    """Larger steps fetch the next layer's keys during this one's products: it changes no bit."""
    together, alone = decode_steps(
        load_model(resolve_model(str(folder)), dtype=dtype, quantization=quantization), batch
    )
    assert torch.equal(together, alone)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_do_not_matter(folder: Path, threads: int) -> None:
    model = load_model(resolve_model(str(folder)), dtype="float32")
    expected = steps(model, "float32")
    torch.set_num_threads(threads)
    assert torch.equal(steps(model, "float32"), expected)


def test_buffers_are_used_again(folder: Path) -> None:
    """A layer more takes operations, not memory."""
    model = load_model(resolve_model(str(folder)), dtype="float32")
    steps(model, "float32")
    program = model.program
    assert program is not None
    assert program.num_ops > 8 * model.config.num_layers
    assert program.num_buffers < 16


def test_what_cannot_be_recorded_is_said(caplog: pytest.LogCaptureFixture) -> None:
    if native_backend() is None:
        pytest.skip("no C++ compiler here")
    norm = torch.ones(24)

    def forward(recorder: ProgramRecorder) -> Tensor:
        return rms_norm(recorder.embed(torch.randn(8, 24), 1.0), norm, 1e-6)

    with caplog.at_level("WARNING"):
        assert record(torch.float32, forward) is None
    assert "24 is no multiple of 16" in caplog.text
    assert record(torch.float64, forward) is None


def test_tensors_do_not_mix_with_slots() -> None:
    native = native_backend()
    if native is None:
        pytest.skip("no C++ compiler here")
    recorder = ProgramRecorder(native, torch.float32)
    hidden = recorder.embed(torch.randn(8, 32), 1.0)
    with pytest.raises(NotRecordable, match="not of this step"):
        add_rms_norm(hidden, torch.randn(4, 32), torch.ones(32), 1e-6)
    with pytest.raises(NotRecordable, match="not packed"):
        recorder.linear(hidden, None, 32, "", False)
    assert Linear(torch.randn(32, 32))(torch.randn(2, 32)).shape == (2, 32)
