"""A Llama of random weights, all of whose rows 256 divides."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType

from benchmarks.compare import weights
from benchmarks.compare.formats import __main__ as formats
from benchmarks.compare.formats import random_k
from benchmarks.compare.formats.files import bits_a_weight, stored_tensors
from benchmarks.compare.formats.random_k import Shape, random_file
from benchmarks.compare.peer import PeerError
from common.engine.models.load import load_model
from common.model_files.files import ModelFiles
from common.model_files.gguf.metadata import read_gguf_head
from common.model_files.resolve import resolve_model

from ....common.engine.models.gguf_checkpoint import write_gguf

SMALL = Shape(hidden=256, inner=512, layers=2, heads=4, kv_heads=2, head_dim=64)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelFiles:
    """The tiny model as a GGUF file; what is made of it lies in a folder of the test."""
    monkeypatch.setattr(random_k, "cache_folder", lambda: tmp_path / "cache")
    folder = resolve_model("tiny-random").weights[0].parent
    path = write_gguf(folder, tmp_path / "own.gguf", "llama", GGMLQuantizationType.Q8_0)
    return resolve_model(str(path), progress=False)


def test_it_has_the_tokenizer_of_another_and_sizes_of_its_own(own: ModelFiles) -> None:
    path = random_file(own, SMALL)
    head, before = read_gguf_head(path), read_gguf_head(own.weights[0])
    matrices = [tensor for tensor in head.tensors if len(tensor.shape) == 2]
    assert len(matrices) == 1 + 7 * SMALL.layers
    assert all(tensor.shape[0] % 256 == 0 for tensor in matrices)
    assert {tensor.kind for tensor in stored_tensors(path)} == {"BF16", "F32"}
    name = "tokenizer.ggml.tokens"
    assert head.metadata[name] == before.metadata[name]
    assert bits_a_weight(path, resolve_model(str(path), progress=False)) == 16.0
    assert random_file(own, SMALL).stat().st_mtime_ns == path.stat().st_mtime_ns


def test_it_is_a_model(own: ModelFiles) -> None:
    with torch.inference_mode():
        config = load_model(resolve_model(str(random_file(own, SMALL)), progress=False), dtype="float32").config
    assert (config.hidden_size, config.num_layers, config.num_heads, config.num_kv_heads) == (256, 2, 4, 2)


def test_other_models_lend_no_metadata(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(PeerError, match="no GGUF file of a Llama"):
        random_file(resolve_model("tiny-random"), SMALL)
    assert formats.main(["--model=tiny-random", "--random-k"]) == 2
    assert "no GGUF file of a Llama" in capsys.readouterr().err


def test_the_default_shape_is_of_whole_k_quants() -> None:
    assert {size[-1] % 256 for _, size in Shape().tensors(512)} == {0}
    assert weights.EMBEDDING in dict(Shape().tensors(512))
