"""The model as peers read it: the same values, in every format."""

import json
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType
from gguf.quants import quantize
from msgspec import structs
from safetensors.torch import load_file

from benchmarks.compare.peer import PeerError
from benchmarks.compare.weights import (
    EMBEDDING,
    GGUF_TYPES,
    convert,
    quantise_rows,
    write_folder,
    write_gguf,
    written_once,
)
from common.engine.models.load import load_model
from common.model_files.files import ModelFiles
from common.model_files.gguf.metadata import read_gguf_head
from common.model_files.gguf.tensors import GGUFFile
from common.model_files.resolve import resolve_model

MATRIX, NORM = "blk.0.ffn_up.weight", "blk.0.ffn_norm.weight"
GENERATOR = torch.Generator().manual_seed(3)


@pytest.fixture
def tiny() -> ModelFiles:
    return resolve_model("tiny-random")


@pytest.fixture
def small_gguf(tmp_path: Path) -> Path:
    """Three tensors and some metadata, the embedding in Q8_0 as in published Q4 files."""
    path = tmp_path / "small.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(77)
    writer.add_token_list(["a", "ü", "c"])
    writer.add_file_type(LlamaFileType.ALL_F32)
    values = torch.randn(6, 64, generator=GENERATOR).numpy()
    for name, kind in ((EMBEDDING, GGMLQuantizationType.Q8_0), (MATRIX, GGMLQuantizationType.F32)):
        writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
    writer.add_tensor(NORM, values[0].copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("form", GGUF_TYPES)
def test_a_gguf_file_is_written_again_in_another_type(small_gguf: Path, tmp_path: Path, form: str) -> None:
    kind, file_type = GGUF_TYPES[form]
    write_gguf(small_gguf, tmp_path / "out.gguf", kind, file_type)
    source, written = GGUFFile(small_gguf), GGUFFile(tmp_path / "out.gguf")
    types = {tensor.name: tensor.type for tensor in read_gguf_head(tmp_path / "out.gguf").tensors}
    kept = form in ("gguf-q4_0", "gguf-mxfp4")
    assert types == {EMBEDDING: GGMLQuantizationType.Q8_0 if kept else kind, MATRIX: kind, NORM: 0}
    assert written.metadata == {**source.metadata, "general.file_type": file_type}
    largest = abs(source.read(MATRIX)).max()
    error = abs(written.read(MATRIX) - source.read(MATRIX)).max()
    least = {"gguf-bf16": 2**-8, "gguf-f16": 2**-11, "gguf-q8_0": 1 / 250, "gguf-q4_0": 1 / 7, "gguf-mxfp4": 1 / 3}
    assert error <= largest * least[form]
    assert (written.read(NORM) == source.read(NORM)).all()


def test_a_folder_holds_the_models_own_values(tiny: ModelFiles, tmp_path: Path) -> None:
    write_folder(tiny, tmp_path / "hf", int8=False)
    ours = load_model(tiny, dtype="bfloat16").weights
    theirs = load_model(resolve_model(str(tmp_path / "hf")), dtype="bfloat16").weights
    assert torch.equal(ours.embedding.weight, theirs.embedding.weight)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert "eos_token_id" not in config
    stored, original = load_file(tmp_path / "hf" / "model.safetensors"), load_file(tiny.weights[0])
    assert stored.keys() == original.keys()
    assert all(torch.equal(stored[name], original[name].to(torch.bfloat16)) for name in stored)


def test_an_int8_folder_has_codes_and_a_scale_a_row(tiny: ModelFiles, tmp_path: Path) -> None:
    write_folder(tiny, tmp_path / "int8", int8=True)
    stored, original = load_file(tmp_path / "int8" / "model.safetensors"), load_file(tiny.weights[0])
    codes = [name for name in stored if stored[name].dtype == torch.int8]
    assert len(codes) == 7 * 4  # matrices of each of the tiny model's layers
    for name in codes:
        scale, weight = stored[f"{name}_scale"].float(), original[name].float()
        assert ((stored[name] * scale - weight).abs() <= scale).all()
    assert (
        json.loads((tmp_path / "int8" / "config.json").read_text())["quantization_config"]["format"] == "int-quantized"
    )


def test_rows_are_quantised_on_their_own() -> None:
    weight = torch.tensor([[1.0, -127.0], [0.5, 0.25], [0.0, 0.0]])
    codes, scales = quantise_rows(weight)
    assert codes.tolist() == [[1, -127], [127, 64], [0, 0]]
    assert scales.shape == (3, 1)
    assert scales[:2, 0].tolist() == pytest.approx([1.0, 0.5 / 127], rel=2**-8)


def test_formats_are_made_once(tiny: ModelFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIPTYCH_CACHE", str(tmp_path))
    first = convert(tiny, ["hf", "hf-w8a8", "hf"])
    assert sorted(first) == ["hf", "hf-w8a8"]
    stamp = (first["hf"] / "model.safetensors").stat().st_mtime_ns
    assert (convert(tiny, ["hf"])["hf"] / "model.safetensors").stat().st_mtime_ns == stamp


def test_a_mix_is_made_once_of_the_file_in_bfloat16(
    small_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIPTYCH_CACHE", str(tmp_path / "cache"))
    files = structs.replace(resolve_model("tiny-random"), format="gguf", weights=(small_gguf,))
    made: list[tuple[str, str]] = []

    def mix(floats: Path, path: Path, kind: str) -> None:
        made.append((floats.name, kind))
        path.touch()

    for _ in range(2):
        path = convert(files, ["gguf-q4_k_m"], mix)["gguf-q4_k_m"]
    assert made == [("gguf-bf16.gguf", "Q4_K_M")]
    assert (path.name, path.exists()) == ("gguf-q4_k_m.gguf", True)
    with pytest.raises(PeerError, match=r"llama\.cpp's own tool writes gguf-q6_k"):
        convert(files, ["gguf-q6_k"])


def test_a_write_that_failed_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="full"), written_once(tmp_path / "model") as unfinished:
        assert unfinished is not None
        unfinished.mkdir()
        raise OSError("full")
    with written_once(tmp_path / "model") as unfinished:
        assert unfinished is not None
        assert not unfinished.exists()
        unfinished.touch()
    assert (tmp_path / "model").is_file()


def test_a_model_that_cannot_be_converted_is_refused(tiny: ModelFiles, tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="no GGUF file"):
        convert(tiny, ["gguf-bf16"])
    with pytest.raises(PeerError, match="gemma3"):
        write_folder(resolve_model("tiny-random-gemma3"), tmp_path / "hf", int8=False)
    assert not (tmp_path / "hf").exists()
