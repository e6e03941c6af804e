"""What weights will take, by the heads of their files, beside what loading them really takes; and what is refused."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.config import DecodeWorkerConfig, PrefillWorkerConfig
from common.engine.models.draft_heads.load import load_drafting_model
from common.engine.models.load import load_model
from common.engine.ranks.shard import load_shard
from common.engine.run import memory_need
from common.engine.run.draft_model import DraftPlan
from common.engine.run.loaded import LoadedModel
from common.engine.run.memory_need import GIB, REST_BYTES, MemoryNeed
from common.engine.run.worker_need import WeightFootprint, WeightForm, remedies, required_memory, weight_bytes
from common.engine.weights.formats.stored import StoredForm, StoredTensor
from common.errors import ModelError
from common.machine import MemoryFile
from common.machine.memory import Available
from common.model_files.architecture.shard import Shard
from common.model_files.files import ModelFiles
from common.model_files.quantization import Quantization
from common.model_files.resolve import resolve_model
from common.model_files.tiny import make_tiny_model
from common.observe import progress
from kernels.cpu import shared_weights

from ....draft_heads import eagle_folder
from ..models.generation import files_of
from ..models.mxfp4_checkpoint import write_mxfp4
from ..models.test_gguf_families import written
from ..models.threaded_ranks import Sums
from ..weights.formats.checkpoints import FORMATS, write_checkpoint

# Counts the memory that the weights of a loaded model take.


def taken_bytes(*parts: object) -> int:
    """Of all tensors in these objects, each once; what lies in a mapped file of weights is none of it."""
    files = _mapped_files()
    found = {tensor.data_ptr(): tensor.nbytes for part in parts for tensor in _tensors(part, set())}
    return sum(size for address, size in found.items() if not any(address in span for span in files))


def _tensors(part: object, seen: set[int]) -> Iterator[Tensor]:
    if id(part) in seen:
        return
    seen.add(id(part))
    if isinstance(part, Tensor):
        yield part.to_dense() if part.is_mkldnn else part
        return
    inner: list[object] = []
    if isinstance(part, Mapping):
        inner = list(part.values())
    elif isinstance(part, list | tuple):
        inner = list(part)
    elif dataclasses.is_dataclass(part):
        inner = [getattr(part, field.name) for field in dataclasses.fields(part)]
    elif type(part).__module__.startswith(("common", "kernels")):
        inner = list(vars(part).values()) if hasattr(part, "__dict__") else []
    for one in inner:
        yield from _tensors(one, seen)


def _mapped_files() -> list[range]:
    """Addresses at which this process has mapped safetensors files."""
    spans = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(".safetensors"):
            first, last = (int(end, 16) for end in line.split()[0].split("-"))
            spans.append(range(first, last))
    return spans


LEAST_SHARE = 0.4
"""Of what weights take: float32 may turn out to fit 16 bits, vectors and padding are left out."""


def check_estimate(files: ModelFiles, dtype: str, quantization: str) -> None:
    """That it is not above what weights take, and not far below."""
    form = WeightForm(dtype, "cpu", quantization)
    model = load_model(files, dtype=dtype, quantization=quantization)
    expected, taken = weight_bytes(files, form), taken_bytes(model.weights)
    assert LEAST_SHARE * taken < expected <= taken, (expected, taken)


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_floats(tiny_folder: Path, dtype: str, quantization: str) -> None:
    check_estimate(files_of(tiny_folder), dtype, quantization)


def test_weights_of_16_bits_are_not_counted_as_32(tiny_folder: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((tiny_folder / name).read_bytes())
    halves = {name: one.to(torch.bfloat16) for name, one in load_file(tiny_folder / "model.safetensors").items()}
    save_file(halves, tmp_path / "model.safetensors", {"format": "pt"})
    check_estimate(files_of(tmp_path), "float32", "none")
    check_estimate(files_of(tmp_path), "bfloat16", "none")


@pytest.mark.quick_cover(1)
@pytest.mark.parametrize("quantization", ["auto", "none", "int8", "int4"])
@pytest.mark.parametrize("name", ["gptq int4", "gptq int8", "gptq act order", "awq", "w4a16", "w8a16", "fp8 by block"])
def test_quantised_checkpoints(tiny_folder: Path, tmp_path: Path, name: str, quantization: str) -> None:
    write_checkpoint(tiny_folder, tmp_path / "held", FORMATS[name])
    check_estimate(files_of(tmp_path / "held"), "float32", quantization)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind", "quantization"),
    [
        ("mixtral", "Q8_0", "auto"),
        ("mixtral", "Q4_0", "int8"),
        ("mixtral", "MXFP4", "auto"),
        ("mixtral", "Q5_1", "auto"),
        ("deepseek-v3", "F32", "int8"),
        ("deepseek-v3", "F16", "none"),
    ],
)
def test_gguf(tmp_path: Path, name: str, kind: str, quantization: str) -> None:
    _, files = written(tmp_path, name, gguf.GGMLQuantizationType[kind])
    check_estimate(files, "bfloat16", quantization)


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["auto", "none"])
def test_a_real_model(smollm2_files: ModelFiles, quantization: str) -> None:
    check_estimate(smollm2_files, "bfloat16", quantization)


def test_experts_of_small_floats(tmp_path: Path) -> None:
    _, held = write_mxfp4(tmp_path)
    check_estimate(files_of(held), "bfloat16", "auto")


def test_a_gpu_keeps_small_floats_and_widens_what_no_kernel_multiplies() -> None:
    on_gpu = WeightFootprint("bfloat16", Quantization.AUTO, on_cpu=False, tied=False)
    held = StoredTensor("model.layers.0.mlp.up_proj.weight", 1000, 1000, 8, StoredForm.SMALL_FLOATS)
    other = StoredTensor("blk.0.ffn_up.weight", 330, 1000, 2, StoredForm.OTHER)
    assert on_gpu.of([held]) == 1000
    assert on_gpu.of([other]) == 2000
    assert WeightFootprint("bfloat16", Quantization.AUTO, on_cpu=True, tied=False).of([held, other]) == 2 * 1093 + 1


def test_a_tied_table_is_counted_once() -> None:
    table = StoredTensor("model.embed_tokens.weight", 2000, 1000, 16, dtype="bfloat16")
    for on_cpu, expected in ((False, 2000), (True, 1500)):
        assert WeightFootprint("bfloat16", Quantization.NONE, on_cpu=on_cpu, tied=True).of([table]) == expected
    # As it lies in the file it is page cache; as float32 it is not.
    assert WeightFootprint("bfloat16", Quantization.NONE, on_cpu=True, tied=False).of([table]) == 0
    assert WeightFootprint("float32", Quantization.NONE, on_cpu=True, tied=False).of([table]) == 4000


def test_layers_that_are_not_read_are_not_counted() -> None:
    names = ["model.layers.3.mlp.up_proj.weight", "blk.3.ffn_up.weight", "vision_tower.layers.0.mlp.up_proj.weight"]
    tensors = [StoredTensor(name, 2, 1, 16) for name in names]
    assert [one.is_of(4) for one in tensors] == [True, True, False]
    assert not any(one.is_of(3) for one in tensors)


@pytest.mark.parametrize(
    ("settings", "kv"),
    [
        ({}, GIB),
        ({"kv_memory_gib": 3.0}, 3 * GIB),
        ({"num_blocks": 100}, 100 * 4 * 2 * 16 * 2 * 16 * 4),
        ({"num_blocks": 100, "tensor_parallel_size": 2}, 100 * 4 * 16 * 2 * 16 * 4),
        ({"num_blocks": 100, "kv_cache_dtype": "fp8"}, 100 * 4 * 2 * 16 * 2 * 16),
    ],
)
def test_kv_by_the_settings(settings: dict[str, Any], kv: int) -> None:
    files, form = resolve_model("tiny-random"), WeightForm("float32", "cpu", "none")
    need = required_memory(files, PrefillWorkerConfig(**settings), form, settings.get("kv_cache_dtype", "float32"))
    assert need.kv == kv
    assert need.weights == weight_bytes(files, form) // settings.get("tensor_parallel_size", 1)
    assert need.total == need.weights + kv + REST_BYTES


def test_a_draft_head_counts(tiny_folder: Path, tmp_path: Path) -> None:
    """Beside its weights the model then has states and tables of rotation, so only the lower bound can be close."""
    files, head = files_of(tiny_folder), str(eagle_folder(tmp_path / "head", tiny_folder))
    form = WeightForm("float32", "cpu", "int8")
    alone, both = weight_bytes(files, form), weight_bytes(files, form, head)
    model = load_drafting_model(files, head, num_places=1, quantization="int8")
    taken = taken_bytes(model) - taken_bytes(load_model(files, quantization="int8"))
    matrices = [one for name, one in load_file(Path(head) / "model.safetensors").items() if one.dim() == 2]
    own = sum(one.numel() for one in matrices if one.shape[0] != model.config.vocab_size)
    assert own < both - alone <= min(taken, 1.2 * own)


def test_a_draft_model_counts() -> None:
    files, form = resolve_model("tiny-random"), WeightForm("float32", "cpu", "none")
    config = DecodeWorkerConfig(num_blocks=10, draft_model="tiny-random", draft_quantization="none")
    drafts = (None, DraftPlan.of(files, config, "float32"))
    alone, both = (required_memory(files, config, form, "float32", draft) for draft in drafts)
    assert (both.weights, both.kv) == (2 * alone.weights, 2 * alone.kv)


def test_reading_is_told_with_its_bytes(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(progress, "PROGRESS_EVERY_S", 0.0)
    files = files_of(tiny_folder)
    with caplog.at_level("INFO", "common.engine.models"):
        load_model(files)
    total = sum(one.nbytes for one in load_file(files.weights[0]).values() if one.dim() > 1)
    first, *lines, last = caplog.messages
    assert first == f"model {files.model_id}: loading {total / 1e6:.1f} MB of weights from {files.weights[0]}"
    assert last.startswith(f"model {files.model_id}: loaded weights in ")
    assert len(lines) > 20
    assert lines[-1] == f"weights: {total / 1e6:.1f} of {total / 1e6:.1f} MB read"


def test_ranks_tell_it_once(tiny_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "quantization": "none"}
    for rank, expected in ((1, 0), (0, 2)):
        caplog.clear()
        with caplog.at_level("INFO", "common.engine.models"):
            load_shard(files_of(tiny_folder), Shard(rank, 2), Sums(), **options)
        assert sum("weights" in line for line in caplog.messages) == expected


def test_what_does_not_fit_is_refused_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    need = MemoryNeed("big", 7 * GIB, GIB, "--kv-memory-gib below 1")
    left = Available(8 * GIB, "memory.max of 9.00 GiB in /sys/fs/cgroup, less its use")
    monkeypatch.setattr(memory_need, "host_memory", lambda: left)
    with pytest.raises(ModelError) as refused:
        need.check("cpu")
    assert str(refused.value) == (
        "big does not fit in memory (no weights were read): weights take 7.00 GiB, KV 1.00 GiB, steps and the rest "
        "0.25 GiB, in total at least 8.25 GiB; 8.00 GiB available on cpu (memory.max of 9.00 GiB in "
        "/sys/fs/cgroup, less its use). Provide more memory, or use --kv-memory-gib below 1"
    )
    MemoryNeed("smaller", 6 * GIB, GIB, "").check("cpu")
    with pytest.raises(ModelError, match="weights take 12.00 GiB in 2 ranks"):
        MemoryNeed("smaller", 6 * GIB, GIB, "").check("cpu", [MemoryNeed("smaller", 6 * GIB, GIB, "")])
    monkeypatch.setattr(memory_need, "host_memory", lambda: None)
    need.check("cpu")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {"num_blocks": 9},
            "--quantization int8 or int4, or --num-blocks below 9",
        ),
        (
            {"quantization": "int8", "kv_memory_gib": 2.5},
            "--quantization int4, or --kv-memory-gib below 2.5",
        ),
        ({"device": "cuda"}, "a model with fewer bits, or --tensor-parallel-size above 1, on more GPUs"),
    ],
)
def test_remedies(settings: dict[str, Any], expected: str) -> None:
    assert remedies(PrefillWorkerConfig(**settings)) == expected


def test_weights_of_updates_are_not_added_to_the_memory_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its entries are never freed. A worker that woke up with other weights has loaded them as an update too."""
    memory = MemoryFile("diptych-test")
    if not memory.path:
        pytest.skip("this system has no memory files")
    for name, unset in (("_file", None), ("_path", "")):
        monkeypatch.setattr(shared_weights, name, unset)
    monkeypatch.setattr(shared_weights.WeightsFile, "has_large_pages", lambda self: True)
    files = [resolve_model(str(make_tiny_model(tmp_path / f"{seed}", seed=seed))) for seed in range(3)]
    config = DecodeWorkerConfig(model="m", dtype="float32", num_blocks=8, weight_share=memory.path)
    first = LoadedModel.load(files[0], config)
    assert (num_blocks := os.stat(memory.path).st_blocks)
    updated = first.stage(files[1], config)()
    awake = LoadedModel.load(files[2], config)
    assert len({each.weights for each in (first, updated, awake)}) == 3
    assert os.stat(memory.path).st_blocks == num_blocks
