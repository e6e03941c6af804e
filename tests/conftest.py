"""What every test may rely on: no setting leaks in from the environment."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]

REAL_PROCESSES_S = 360
"""A deadline is against what hangs: real processes start at the pace of the machine, and of what else it does."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what this machine cannot run, and gives real processes time. torch is asked only for a GPU test."""
    absent = {}
    if any(item.get_closest_marker("gpu") for item in items) and not has_cuda():
        absent["gpu"] = "no CUDA device"
    for item in items:
        if item.get_closest_marker("e2e") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(REAL_PROCESSES_S))
        for marker, reason in absent.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


def has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(autouse=True)
def no_settings_from_outside(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """But where models are kept, what kernels are compiled for, and for whole systems the device (cuda: on a GPU)."""
    kept = {"DIPTYCH_CACHE", "DIPTYCH_MARCH", *(("DIPTYCH_DEVICE",) if request.node.get_closest_marker("e2e") else ())}
    for name in list(os.environ):
        if name.startswith("DIPTYCH_") and name not in kept:
            monkeypatch.delenv(name)


@pytest.fixture(scope="module", autouse=True)
def what_a_file_leaves_open_is_its_own() -> Iterator[None]:
    """A socket that a test forgot is found in its own file, not in a later one in which garbage is collected."""
    yield
    gc.collect()


@pytest.fixture
def repository() -> Path:
    """The folder with pyproject.toml."""
    return ROOT


@pytest.fixture(scope="session")
def tiny() -> tuple[Any, tuple[int, ...]]:
    """The tiny random model in float32, and its end tokens."""
    from common.model.load import load_model
    from common.model_files.resolve import resolve_model

    files = resolve_model("tiny-random")
    return load_model(files), files.eos_token_ids
