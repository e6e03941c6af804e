from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

from common import __version__
from common.packages import PACKAGES

TRANSFORMERS = """
import sys
import kernels
from transformers import LlamaConfig, LlamaForCausalLM
sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(sys.argv[1])
model = LlamaForCausalLM.from_pretrained(sys.argv[1])
import torch
print(kernels.__file__, tuple(model(torch.tensor([[1, 2, 3]])).logits.shape))
"""


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def project(pytestconfig: pytest.Config) -> dict[str, Any]:
    return tomllib.loads((pytestconfig.rootpath / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def wheel(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of what belongs in it, so that the build leaves nothing in the tree."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in (*PACKAGES, "pyproject.toml", "README.md", "LICENSE"):
        if (pytestconfig.rootpath / name).exists():
            (source / name).symlink_to(pytestconfig.rootpath / name)
    run(sys.executable, "-P", "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source))
    return next(out.glob("*.whl"))


def test_the_list_of_packages_is_the_tree(project: dict[str, Any]) -> None:
    """A package within these is found by itself; that it is in the wheel is seen below."""
    found = project["tool"]["setuptools"]["packages"]["find"]
    assert found["include"] == [pattern for name in PACKAGES for pattern in (name, f"{name}.*")]
    assert found["namespaces"] is False


def test_every_tool_knows_the_packages(project: dict[str, Any]) -> None:
    tools = project["tool"]
    assert tuple(tools["mypy"]["files"]) == PACKAGES
    assert tuple(tools["ruff"]["lint"]["isort"]["known-first-party"]) == PACKAGES
    assert project["project"]["scripts"] == {"diptych": "common.cli:main"}


def test_every_folder_with_code_is_a_package(repository: Path) -> None:
    bare = {
        str(file.parent)
        for folder in PACKAGES
        for file in (repository / folder).rglob("*.py")
        if not (file.parent / "__init__.py").exists()
    }
    assert not bare


def test_every_package_is_typed(repository: Path) -> None:
    assert all((repository / folder / "py.typed").exists() for folder in PACKAGES)


def test_the_wheel_holds_every_file(repository: Path, wheel: Path) -> None:
    expected = {
        str(file.relative_to(repository))
        for folder in PACKAGES
        for pattern in ("*.py", "py.typed", "static/**/*", "native/*", "data/*")
        for file in (repository / folder).rglob(pattern)
        if file.is_file()
    }
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert held == expected


def test_the_installed_wheel_runs_without_its_dependencies(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=False)
    pip = (sys.executable, "-P", "-m", "pip", "--disable-pip-version-check", "--python", str(tmp_path / "venv"))
    run(*pip, "install", "--no-deps", "--no-index", str(wheel))
    assert run(str(tmp_path / "venv" / "bin" / "diptych"), "--version") == f"diptych {__version__}\n"


def test_transformers_is_undisturbed_by_our_kernels(repository: Path, tmp_path: Path) -> None:
    """It may import PyPI's `kernels`, and tells by the distribution whether that is there."""
    environment = os.environ | {"PYTHONPATH": str(repository), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-P", "-c", TRANSFORMERS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == f"{repository / 'kernels' / '__init__.py'} (1, 3, 64)\n"
