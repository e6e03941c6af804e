"""What every test may rely on: the repository root is not importable and no setting leaks in from the environment."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# `python -m pytest` puts the working folder first: there `kernels` would shadow the package that transformers imports.
sys.path[:] = [entry for entry in sys.path if Path(entry or os.curdir).resolve() != ROOT]


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("DIPTYCH_") and name != "DIPTYCH_CACHE":
            monkeypatch.delenv(name)


@pytest.fixture
def repository() -> Path:
    """The folder with pyproject.toml."""
    return ROOT
