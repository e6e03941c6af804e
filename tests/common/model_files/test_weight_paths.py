"""Which files of a folder are a model's weights, and what is refused instead of guessed."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from common.engine.weights.safetensors_weights import SafetensorsWeights
from common.errors import ModelError
from common.model_files.weight_paths import check_safetensors, weight_files


def write(folder: Path, *names: str, tensors: tuple[str, ...] = ("model.norm.weight",)) -> Path:
    """Files that each hold those tensors, one number each."""
    head = {name: {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]} for i, name in enumerate(tensors)}
    encoded = json.dumps(head).encode()
    for name in names:
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + bytes(4 * len(tensors)))
    return folder


def index(folder: Path, **placed: Any) -> Path:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    return folder


def chosen(folder: Path) -> list[str]:
    return [path.name for path in weight_files(folder)]


SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
OTHERS = ("consolidated.safetensors", "adapter_model.safetensors", "model.fp16.safetensors", "optimizer.safetensors")


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (("model.safetensors", *OTHERS), ["model.safetensors"]),
        (("model.safetensors", *SHARDS), ["model.safetensors"]),
        ((*SHARDS, *OTHERS), [*SHARDS]),
        (("consolidated.safetensors",), ["consolidated.safetensors"]),
        (
            ("x-00001-of-00002.safetensors", "x-00002-of-00002.safetensors"),
            ["x-00001-of-00002.safetensors", "x-00002-of-00002.safetensors"],
        ),
    ],
)
def test_other_files_of_the_folder_are_left_alone(tmp_path: Path, names: tuple[str, ...], found: list[str]) -> None:
    (tmp_path / "checkpoint.safetensors").mkdir()
    (tmp_path / "lost.safetensors").symlink_to(tmp_path / "nowhere")
    assert chosen(write(tmp_path, *names)) == found


def test_an_index_says_which_files_are_read(tmp_path: Path) -> None:
    write(tmp_path, "a.safetensors", "sub/b.safetensors", *OTHERS)
    index(tmp_path, x="a.safetensors", y="sub/b.safetensors")
    assert weight_files(tmp_path) == (tmp_path / "a.safetensors", tmp_path / "sub" / "b.safetensors")
    write(tmp_path, "model.safetensors")
    assert chosen(tmp_path) == ["model.safetensors"]
    index(tmp_path, x="a.safetensors", y="model.safetensors")
    assert chosen(tmp_path) == ["a.safetensors", "model.safetensors"]


@pytest.mark.parametrize(
    ("placed", "why"),
    [
        ({"x": "../x.safetensors"}, r"weight_map.x is '../x.safetensors', which is outside of the model folder"),
        ({"x": "/x.safetensors"}, r"weight_map.x is '/x.safetensors', which is outside of the model folder"),
        ({"x": "sub/../../x.safetensors"}, "is outside of the model folder"),
        ({"x": 3}, "weight_map.x is 3, expected the name of a .safetensors file"),
        ({"x": "pytorch_model.bin"}, "weight_map.x is 'pytorch_model.bin', expected the name of a .safetensors file"),
        ({"x": "a.safetensors"}, r"lists 1 shards, of which \['a.safetensors'\] are missing"),
        ({}, "weight_map is {}, expected an object"),
    ],
)
def test_a_bad_index_is_refused(tmp_path: Path, placed: dict[str, Any], why: str) -> None:
    folder = tmp_path / "model"
    write(tmp_path, "x.safetensors", "model/other.safetensors")
    with pytest.raises(ModelError, match=why):
        weight_files(index(folder, **placed))


@pytest.mark.parametrize(
    ("names", "why"),
    [
        ((), "has no .safetensors weights"),
        (SHARDS[:1], "has 1 of the 2 files model-...-of-00002.safetensors, without numbers .2."),
        (OTHERS[:2], r"several other .safetensors files \(adapter_model.safetensors, consolidated.safetensors\)"),
        ((*SHARDS, "model-00001-of-00001.safetensors"), "several other .safetensors files"),
    ],
)
def test_what_is_no_single_model_is_refused(tmp_path: Path, names: tuple[str, ...], why: str) -> None:
    with pytest.raises(ModelError, match=why):
        weight_files(write(tmp_path, *names))


def test_a_tensor_that_is_there_twice_is_refused_with_both_places(tmp_path: Path) -> None:
    write(tmp_path, *SHARDS)
    with pytest.raises(
        ModelError, match=r"duplicate tensor model.norm.weight, as model.norm.weight of model-00001-of-00002"
    ):
        SafetensorsWeights(weight_files(tmp_path))
    write(tmp_path, "model.safetensors", tensors=("norm.weight", "model.norm.weight"))
    with pytest.raises(
        ModelError, match=r"duplicate tensor model.norm.weight, as model.norm.weight of .* and as norm.weight of"
    ):
        SafetensorsWeights(weight_files(tmp_path))


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "is not a safetensors file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n", "is a Git LFS pointer"),
        (struct.pack("<Q", 2) + b"[]", "is not a safetensors file"),
        (struct.pack("<Q", 19) + b'{"a":{"b":[]}}     ', "is not a safetensors file"),
        (struct.pack("<Q", 25) + b'{"a":{"data_offsets":[]}}', "is not a safetensors file"),
        (struct.pack("<Q", 200_000) + b"[" * 200_000, "is not a safetensors file"),
    ],
)
def test_a_file_of_other_content_is_refused(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=why):
        check_safetensors(path)
