"""Names that others may take: `diptych` says so before it fails, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.packages import PACKAGES, foreign_packages


def diptych(path: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    """The command, with `path` before everything that is installed. `common` itself is found: it is what runs."""
    environment = os.environ | {"PYTHONPATH": str(path)}
    command = [sys.executable, "-P", "-m", "common.cli", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)


def test_here_every_name_is_ours(tmp_path: Path) -> None:
    assert not list(foreign_packages())
    done = diptych(tmp_path, "size", "--help")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", [name for name in PACKAGES if name not in ("common", "router")])
def test_another_package_of_a_name_is_told(tmp_path: Path, repository: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").touch()
    done = diptych(tmp_path, "size", "--help")
    assert done.returncode == 0
    (line,) = done.stderr.splitlines()
    places = f"would be imported from {tmp_path / name} instead of {repository / name}, because "
    assert line.startswith(f"diptych: warning: the package {name} {places}")


def test_a_module_of_a_name_is_told_before_the_command_fails(tmp_path: Path) -> None:
    (tmp_path / "router.py").touch()
    done = diptych(tmp_path, "size", "--help")
    assert done.returncode != 0
    place = f"would be imported from {tmp_path / 'router.py'} instead of "
    assert done.stderr.startswith(f"diptych: warning: the package router {place}")


def test_a_folder_without_code_is_no_package(tmp_path: Path) -> None:
    (tmp_path / "router").mkdir()
    done = diptych(tmp_path, "size", "--help")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_start_costs_no_heavy_import() -> None:
    program = "import sys; from common import packages; packages.warn_of_foreign_packages(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert not {"numpy", "torch", "kernels", "router", "benchmarks"} & set(done.stdout.split())
