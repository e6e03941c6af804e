from __future__ import annotations

from pathlib import Path

import pytest

from common.model_files.tiny import make_tiny_model


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny")
