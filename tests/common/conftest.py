"""Real models, from the cache or fetched into it; and tiny ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.model_files.files import ModelFiles
from common.model_files.resolve import resolve_model
from common.model_files.tiny import make_tiny_model


@pytest.fixture(scope="session")
def smollm2_files() -> ModelFiles:
    return resolve_model("smollm2-135m")


@pytest.fixture(scope="session")
def gemma3_files() -> ModelFiles:
    return resolve_model("gemma3-270m")


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty model cache of this test's own."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("DIPTYCH_CACHE", str(folder))
    return folder
