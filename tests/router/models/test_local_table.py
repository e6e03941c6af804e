"""Names of the models on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.config import RouterConfig
from common.errors import ModelError
from router.models.local_table import LocalTable


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DIPTYCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    folder = tmp_path / "models"
    folder.mkdir()
    return folder


def add(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(bytes(10))


def names(table: LocalTable) -> dict[str, str]:
    return {entry.model: entry.name for entry in table.read().models}


def test_models_are_named_after_their_last_part_and_keep_their_names(folder: Path, tmp_path: Path) -> None:
    table = LocalTable(RouterConfig(), str(folder))
    assert names(table) == {}
    add(folder, "b.Q4_K_M.gguf", "small/model.safetensors", "small/config.json")
    before = {str(folder / "b.Q4_K_M.gguf"): "b.Q4_K_M", str(folder / "small"): "small"}
    assert names(table) == before
    assert table.num_bytes[str(folder / "small")] == 10
    built_in = tmp_path / "cache" / "models" / "smollm2-135m" / "model.gguf"
    downloaded = tmp_path / "hub" / "hub" / "models--org--small" / "snapshots" / "1" / "model.safetensors"
    add(folder, str(built_in), str(downloaded), str(downloaded.with_name("config.json")))
    add(folder, "a/small.gguf", "a/large.gguf")
    assert names(table) == before | {
        "smollm2-135m": "smollm2-135m",
        "org/small": "org/small",
        str(folder / "a" / "large.gguf"): "large",
        str(folder / "a" / "small.gguf"): str(folder / "a" / "small.gguf"),
    }
    (folder / "b.Q4_K_M.gguf").unlink()
    assert "b.Q4_K_M" not in names(table).values()
    with pytest.raises(ModelError, match="does not exist"):
        LocalTable(RouterConfig(), str(folder / "absent")).read()


def test_the_models_of_a_file_have_its_names(folder: Path) -> None:
    file = folder / "models.toml"
    file.write_text('[[model]]\nmodel = "org/a"\n[[model]]\nmodel = "/models/b.gguf"\naliases = ["c"]\n')
    table = LocalTable(RouterConfig(models_file=str(file)), "")
    assert names(table) == {"org/a": "org/a", "/models/b.gguf": "b"}
