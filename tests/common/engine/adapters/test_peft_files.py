"""Adapters on disk: what is refused is refused before weights are read, with the field and what is taken."""

from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.engine.adapters.module_patterns import ModulePatterns
from common.engine.adapters.peft_config import PeftConfig
from common.engine.adapters.peft_file import read_adapter
from common.errors import ModelError
from common.model_files import config as configuration
from common.model_files.config import ModelConfig
from common.model_files.tiny import make_tiny_model

from ....adapters import make_adapter


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("base") / "tiny")


@pytest.fixture(scope="module")
def config(base: Path) -> ModelConfig:
    return configuration.from_hf(base / "config.json")


def refusal(folder: Path, config: ModelConfig, max_rank: int = 16) -> str:
    with pytest.raises(ModelError) as error:
        read_adapter(folder, config, max_rank)
    return str(error.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": "LOHA"}, "unsupported peft_type 'LOHA': must be LORA"),
        ({"bias": "all"}, "bias is 'all': biases of adapters are not supported"),
        ({"use_dora": True}, "use_dora is True: DoRA is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is ['lm_head']: modules that are trained whole"),
        ({"target_modules": ["q_proj", "lm_head"]}, "target_modules has 'lm_head': only q_proj, k_proj"),
        ({"fan_in_fan_out": True}, "transposed weights"),
        ({"init_lora_weights": "pissa"}, "modify the base model's weights at initialisation"),
        ({"r": 17}, "invalid r 17: the maximum is 16 (--max-lora-rank)"),
        ({"r": 0}, "invalid r 0: must be a positive integer"),
        ({"rank_pattern": {"q_proj": 40}}, "invalid rank_pattern 40: the maximum is 16"),
        ({"rank_pattern": {"(": 4}}, "rank_pattern: '(' is not supported: "),
        ({"rank_pattern": {"(?!x).*": 4}}, "rank_pattern: '(?!x).*' is not supported: "),
        ({"alpha_pattern": {"(" * 400: 4}}, "is not supported: "),
        ({"lora_alpha": "x"}, "invalid lora_alpha 'x': must be a finite number"),
        ({"lora_alpha": 10**400}, "must be a finite number"),
    ],
)
def test_what_is_refused_before_weights_are_read(
    tmp_path: Path, base: Path, config: ModelConfig, fields: dict[str, Any], message: str
) -> None:
    folder = make_adapter(tmp_path / "adapter", base)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    (folder / "adapter_model.safetensors").write_bytes(b"not weights")
    assert message in refusal(folder, config)


def test_a_missing_or_damaged_file_is_named(tmp_path: Path, base: Path, config: ModelConfig) -> None:
    assert "adapter_config.json (No such file or directory)" in refusal(tmp_path, config)
    folder = make_adapter(tmp_path / "adapter", base)
    (folder / "adapter_model.safetensors").write_bytes(b"not weights")
    assert "is missing, truncated or damaged" in refusal(folder, config)
    (folder / "adapter_config.json").write_text("{")
    assert "is not valid JSON" in refusal(folder, config)


PREFIX = "base_model.model.model.layers.1.self_attn.q_proj"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({f"{PREFIX}.lora_A.weight": torch.zeros(4, 63)}, "has shape [4, 63], expected [4, 64]"),
        ({f"{PREFIX}.lora_A.weight": torch.zeros(3, 64)}, "has shape [3, 64], expected [4, 64]"),
        ({f"{PREFIX}.lora_B.weight": torch.zeros(65, 4)}, "has shape [65, 4], expected [64, 4]"),
        (
            {f"{PREFIX}.lora_A.weight": torch.zeros(4, 64, dtype=torch.int8)},
            "has type torch.int8, must be 16- or 32-bit float",
        ),
        ({f"{PREFIX}.lora_A.weight": None}, "has no lora_A or no lora_B"),
        ({f"{PREFIX}.bias": torch.zeros(4)}, "is not supported: only LoRA weights of q_proj"),
        ({"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 64)}, "is not supported: only LoRA weights"),
        (
            {f"base_model.model.model.layers.9.self_attn.q_proj.lora_{ab}.weight": torch.zeros(1) for ab in "AB"},
            "is in layer 9, but the base model has 4 layers",
        ),
        (
            {f"base_model.model.model.layers.1.mlp.router.lora_{ab}.weight": torch.zeros(1) for ab in "AB"},
            "is not supported in this base model",
        ),
        ({f"{PREFIX}.lora_B.weight": torch.full((64, 4), float("nan"))}, "contains numbers that are not finite"),
        ({f"{PREFIX}.lora_B.other.weight": torch.zeros(64, 4)}, "is a duplicate, or belongs"),
        (
            {f"base_model.model.other.layers.1.self_attn.q_proj.lora_{ab}.weight": torch.zeros(1) for ab in "AB"},
            "belongs to the same module as",
        ),
    ],
)
def test_tensors_that_do_not_fit_the_base_model(
    tmp_path: Path, base: Path, config: ModelConfig, changes: dict[str, torch.Tensor | None], message: str
) -> None:
    folder = make_adapter(tmp_path / "adapter", base)
    path = str(folder / "adapter_model.safetensors")
    tensors = {**load_file(path), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)
    assert message in refusal(folder, config)


def test_the_digest_is_that_of_weights_ranks_and_scales(tmp_path: Path, base: Path, config: ModelConfig) -> None:
    first = make_adapter(tmp_path / "first", base)
    copy = Path(shutil.copytree(first, tmp_path / "copy"))
    scaled = Path(shutil.copytree(first, tmp_path / "scaled"))
    path = scaled / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"lora_alpha": 5}))
    other = make_adapter(tmp_path / "other", base, seed=1)
    digests = [read_adapter(folder, config, 16).digest for folder in (first, copy, scaled, other)]
    assert digests[0] == digests[1] and len(set(digests)) == 3


def test_patterns_match_the_ends_of_names() -> None:
    ranks = ModulePatterns({"layers.1.self_attn.q_proj": 3, "q_proj": 5, r"layers\.[01]\..*": 7})
    config = PeftConfig(Path(), 4, 8.0, rank_pattern=ranks, alpha_pattern=ModulePatterns({"k_proj": 3.0}))
    names = ("layers.1.self_attn.q_proj", "layers.11.self_attn.q_proj", "layers.0.mlp.up_proj", "layers.2.mlp.up_proj")
    assert [config.rank_and_scale(f"model.{name}")[0] for name in names] == [3, 5, 7, 4]
    assert config.rank_and_scale("model.layers.2.self_attn.k_proj") == (4, 3.0 / 4)
    stabilised = PeftConfig(Path(), 4, 8.0, rank_stabilised=True)
    assert stabilised.rank_and_scale("model.layers.2.self_attn.k_proj") == (4, 8.0 / 2)


def test_a_pattern_that_backtracks_for_ever_is_answered_at_once(
    tmp_path: Path, base: Path, config: ModelConfig
) -> None:
    folder = make_adapter(tmp_path / "adapter", base, rank_pattern={})
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rank_pattern": {r"(\w|.|\.)+X": 8}}))
    assert read_adapter(folder, config, 16).rank == 4


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
@pytest.mark.parametrize("kind", ["fifo", "socket", "device", "folder", "link"])
def test_only_regular_files_are_read(
    tmp_path: Path, base: Path, config: ModelConfig, monkeypatch: pytest.MonkeyPatch, name: str, kind: str
) -> None:
    folder = make_adapter(tmp_path / "adapter", base)
    path = folder / name
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        monkeypatch.chdir(folder)  # the path of a socket must be short
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(name)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero" if kind == "device" else folder)
    assert "it is not a regular file" in refusal(folder, config)


def test_links_to_files_are_followed(tmp_path: Path, base: Path, config: ModelConfig) -> None:
    folder = make_adapter(tmp_path / "adapter", base)
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for file in folder.iterdir():
        (snapshot / file.name).symlink_to(file)
    assert read_adapter(snapshot, config, 16).digest == read_adapter(folder, config, 16).digest


def test_a_file_is_no_larger_than_the_base_model_allows(tmp_path: Path, base: Path, config: ModelConfig) -> None:
    folder = make_adapter(tmp_path / "adapter", base)
    os.truncate(folder / "adapter_model.safetensors", 1 << 40)  # sparse: takes no room
    assert "1,099,511,627,776 bytes; the maximum is" in refusal(folder, config)
    os.truncate(folder / "adapter_config.json", 2 << 20)
    assert "2,097,152 bytes; the maximum is 1,048,576" in refusal(folder, config)


def header(**tensors: Any) -> bytes:
    text = json.dumps(tensors).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "damaged: "),
        (header(), "has no tensors"),
        ((1 << 40).to_bytes(8, "little") + b"{}", "damaged: "),
        ((200_000).to_bytes(8, "little") + b"[" * 200_000, "damaged: "),
        (header(a=1), "damaged: "),
        (header(a={"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}), "damaged: "),
        (header(a={"dtype": "F32", "shape": [1], "data_offsets": [0, 8]}) + bytes(8), "damaged: "),
        (header(a={"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}) + bytes(8), "damaged: "),
        (header(a={"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}) + bytes(3), "damaged: "),
    ],
)
def test_damaged_headers(tmp_path: Path, base: Path, config: ModelConfig, content: bytes, message: str) -> None:
    folder = make_adapter(tmp_path / "adapter", base)
    (folder / "adapter_model.safetensors").write_bytes(content)
    assert message in refusal(folder, config)


def test_numbers_that_are_not_aligned_are_read(tmp_path: Path, base: Path, config: ModelConfig) -> None:
    folder = make_adapter(tmp_path / "adapter", base)
    plain = read_adapter(folder, config, 16)
    path = folder / "adapter_model.safetensors"
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    path.write_bytes((size + 1).to_bytes(8, "little") + data[8 : 8 + size] + b" " + data[8 + size :])
    for layer, sites in read_adapter(folder, config, 16).layers.items():
        for site, parts in sites.items():
            for part, known in zip(parts, plain.layers[layer][site], strict=True):
                assert torch.equal(part.a, known.a) and torch.equal(part.b, known.b)
