from __future__ import annotations

import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

from diptych.common import __version__

FOLDERS = ("kernels", "common", "prefill_worker", "decode_worker", "router", "benchmarks")


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
    for name in (*FOLDERS, "pyproject.toml", "README.md", "LICENSE"):
        if (pytestconfig.rootpath / name).exists():
            (source / name).symlink_to(pytestconfig.rootpath / name)
    run(sys.executable, "-P", "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source))
    return next(out.glob("*.whl"))


def test_the_list_of_packages_is_the_tree(repository: Path, project: dict[str, Any]) -> None:
    found = {
        ".".join(("diptych", *file.parent.relative_to(repository).parts))
        for folder in FOLDERS
        for file in (repository / folder).rglob("__init__.py")
    }
    assert set(project["tool"]["setuptools"]["packages"]) == found


def test_every_folder_with_code_is_a_package(repository: Path) -> None:
    bare = {
        str(file.parent)
        for folder in FOLDERS
        for file in (repository / folder).rglob("*.py")
        if not (file.parent / "__init__.py").exists()
    }
    assert not bare


def test_every_package_is_typed(repository: Path) -> None:
    assert all((repository / folder / "py.typed").exists() for folder in FOLDERS)


def test_the_wheel_holds_every_file(repository: Path, wheel: Path) -> None:
    expected = {
        "diptych/" + str(file.relative_to(repository))
        for folder in FOLDERS
        for pattern in ("*.py", "py.typed", "static/*", "native/*", "data/*")
        for file in (repository / folder).rglob(pattern)
    }
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert held == expected


def test_the_installed_wheel_runs_without_its_dependencies(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=False)
    pip = (sys.executable, "-P", "-m", "pip", "--disable-pip-version-check", "--python", str(tmp_path / "venv"))
    run(*pip, "install", "--no-deps", "--no-index", str(wheel))
    assert run(str(tmp_path / "venv" / "bin" / "diptych"), "--version") == f"diptych {__version__}\n"
