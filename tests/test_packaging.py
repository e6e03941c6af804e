from __future__ import annotations

import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from common import __version__
from common.packages import PACKAGES
from kernels.cpu.build import load_native
from kernels.cpu.instruction_sets import features_here, of_machine, that_run

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


LOADED = "from kernels.cpu.build import load_native; print(load_native()._name)"


def run(*command: str, timeout_s: float = 110, **environment: str) -> str:
    settings = os.environ | environment
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False, env=settings)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def project(pytestconfig: pytest.Config) -> dict[str, Any]:
    return tomllib.loads((pytestconfig.rootpath / "pyproject.toml").read_text())


def build(root: Path, source: Path, out: Path, timeout_s: float = 110, **environment: str) -> Path:
    """The wheel, built from a copy of what belongs in it, so that the build leaves nothing in the tree."""
    for name in (*PACKAGES, "pyproject.toml", "setup.py", "README.md", "LICENSE"):
        (source / name).symlink_to(root / name)
    command = (sys.executable, "-P", "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source))
    run(*command, timeout_s=timeout_s, **environment)
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def wheel(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folders = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    return build(pytestconfig.rootpath, *folders, DIPTYCH_KERNELS="")


@pytest.fixture(scope="module")
def wheel_with_kernels(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel with all libraries, from a compiler that takes no time: it copies the one that this machine has."""
    loaded = load_native() or pytest.skip("no C++ compiler here")
    compiler = tmp_path_factory.mktemp("compiler") / "g++"
    linked = f'for last; do :; done; case "$1" in -shared) cp {loaded._name} "$last";; esac'
    compiler.write_text(f"#!/bin/sh\n{linked}\n")
    compiler.chmod(0o755)
    folders = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    return build(pytestconfig.rootpath, *folders, DIPTYCH_KERNELS="all", CXX=str(compiler))


def test_the_list_of_packages_is_the_tree(project: dict[str, Any]) -> None:
    """A package within these is found by itself; that it is in the wheel is seen below."""
    found = project["tool"]["setuptools"]["packages"]["find"]
    assert found["include"] == [pattern for name in PACKAGES for pattern in (name, f"{name}.*")]


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


@pytest.fixture(scope="module")
def left_out(project: dict[str, Any]) -> set[str]:
    """Folders that are not in the wheel."""
    patterns = project["tool"]["setuptools"]["packages"]["find"]["exclude"]
    return {pattern.rstrip("*").replace(".", "/") for pattern in patterns}


def test_what_is_not_in_the_wheel_is_not_needed_there(repository: Path, left_out: set[str]) -> None:
    names = "|".join(folder.replace("/", r"\.") for folder in left_out)
    needs = re.compile(rf"^\s*(?:from|import) (?:{names})\b", re.MULTILINE)
    inside = [
        file
        for folder in PACKAGES
        for file in (repository / folder).rglob("*.py")
        if not any(file.is_relative_to(repository / other) for other in left_out)
    ]
    assert all((repository / folder).is_dir() for folder in left_out)
    assert [str(file) for file in inside if needs.search(file.read_text(encoding="utf-8"))] == []


def test_the_wheel_holds_every_file(repository: Path, wheel: Path, left_out: set[str]) -> None:
    expected = {
        str(file.relative_to(repository))
        for folder in PACKAGES
        for pattern in ("*.py", "*.pyi", "py.typed", "static/**/*", "native/*", "data/*")
        for file in (repository / folder).rglob(pattern)
        if file.is_file() and not any(file.is_relative_to(repository / other) for other in left_out)
    }
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
        version = archive.read("common/version.txt").decode().strip()
    assert held == expected | {"common/version.txt"} and wheel.name.startswith(f"diptych-{version}-")


def test_a_plain_installation_has_everything_that_run_needs(project: dict[str, Any]) -> None:
    """Router, worker, models by name, and pip, which uv's environments do not have."""
    extras = project["project"]["optional-dependencies"]
    assert "diptych[local]" in project["project"]["dependencies"]
    local = [Requirement(one) for one in extras["local"]]
    assert {"router", "worker", "hub"} == local[0].extras and local[1].name == "pip"
    (torch,) = (Requirement(one) for one in extras["worker"] if one.startswith("torch"))
    assert all(torch.specifier.contains(f"2.13.0{build}") for build in ("", "+cpu", "+cu130", "+rocm7.1"))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("installer", ("pip", "pipx", "uvx"))
def test_one_line_leads_from_the_wheel_to_an_answer(
    wheel_with_kernels: Path, repository: Path, tmp_path: Path, installer: str
) -> None:
    """In an empty folder, with an empty home."""
    (home := tmp_path / "home").mkdir()
    if installer == "pip":
        venv.create(tmp_path / "venv", with_pip=True)
        pip = str(tmp_path / "venv" / "bin" / "pip")
        install = (pip, "install", "--quiet", "-c", str(repository / "constraints.txt"), str(wheel_with_kernels))
        start = (str(tmp_path / "venv" / "bin" / "diptych"),)
    else:
        program = shutil.which(installer) or pytest.skip(f"{installer} is not installed")
        install = (program, "install", "--quiet", str(wheel_with_kernels)) if installer == "pipx" else ()
        start = (program, "--from", str(wheel_with_kernels), "diptych")
        if installer == "pipx":
            start = (str(home / ".local" / "bin" / "diptych"),)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("DIPTYCH_", "XDG_"))}
    environment |= {"HOME": str(home), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environment.pop("VIRTUAL_ENV", None)
    options: dict[str, Any] = {"cwd": tmp_path, "env": environment, "stdin": subprocess.DEVNULL}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    question = ("run", "tiny-random", "Hello", "--url", url, "--", "--device", "cpu")
    for command in filter(None, (install, (*start, *question))):
        done = subprocess.run(command, **options, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.strip()


def test_the_command_of_the_wheel_runs_without_its_dependencies(wheel: Path, tmp_path: Path) -> None:
    """As a program that pip writes for it calls it, in a Python that sees no other packages."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
        (scripts,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        module, function = re.findall(r"^diptych = (\S+):(\S+)$", archive.read(scripts).decode(), re.MULTILINE)[0]
    program = f"import sys; from {module} import {function}; sys.exit({function}())"
    shown = run(sys.executable, "-P", "-S", "-c", program, "--version", PYTHONPATH=str(tmp_path / "site"))
    assert shown == f"diptych {__version__}\n"


@pytest.mark.slow
def test_the_installed_wheel_runs_without_its_dependencies(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=False)
    pip = (sys.executable, "-P", "-m", "pip", "--disable-pip-version-check", "--python", str(tmp_path / "venv"))
    run(*pip, "install", "--no-deps", "--no-index", str(wheel))
    assert run(str(tmp_path / "venv" / "bin" / "diptych"), "--version") == f"diptych {__version__}\n"


@pytest.mark.slow
def test_a_wheel_with_kernels_is_for_one_kind_of_machine(wheel: Path, wheel_with_kernels: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    assert re.search(rf"-py3-none-manylinux_2_\d+_{platform.machine()}\.whl$", wheel_with_kernels.name)
    with zipfile.ZipFile(wheel_with_kernels) as archive:
        held = {name for name in archive.namelist() if name.endswith(".so")}
    assert held == {f"kernels/native/built/{each.name}.so" for each in of_machine(platform.machine())}


@pytest.mark.slow
def test_an_installed_wheel_with_kernels_calls_no_compiler(wheel_with_kernels: Path, tmp_path: Path) -> None:
    """Neither what is on the path, where nothing is, nor what CXX names."""
    best, *_ = that_run(platform.machine(), features_here()) or pytest.skip("a CPU for which no wheel has a library")
    called = tmp_path / "called"
    compiler = tmp_path / "g++"
    compiler.write_text(f"#!/bin/sh\n: > {called}\n")
    compiler.chmod(0o755)
    with zipfile.ZipFile(wheel_with_kernels) as archive:
        archive.extractall(tmp_path / "site")
    places = {"PYTHONPATH": str(tmp_path / "site"), "DIPTYCH_CACHE": str(tmp_path / "cache")}
    loaded = run(sys.executable, "-P", "-c", LOADED, PATH="", CXX=str(compiler), DIPTYCH_MARCH="", **places)
    assert loaded == f"{tmp_path / 'site' / 'kernels' / 'native' / 'built' / best.name}.so\n"
    assert not called.exists() and not (tmp_path / "cache").exists()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_kernels_of_a_real_wheel_pass_their_tests(repository: Path, tmp_path: Path) -> None:
    """Compiled for others, each library that this CPU runs computes what the plain loops do."""
    sets = that_run(platform.machine(), features_here()) or pytest.skip("a CPU for which no wheel has a library")
    (tmp_path / "source").mkdir()
    wanted = ",".join(each.name for each in sets)
    built = build(repository, tmp_path / "source", tmp_path / "wheel", 2000, DIPTYCH_KERNELS=wanted)
    with zipfile.ZipFile(built) as archive:
        archive.extractall(tmp_path / "site")
    (site := tmp_path / "site" / "tests").symlink_to(repository / "tests")
    (tmp_path / "site" / "pyproject.toml").symlink_to(repository / "pyproject.toml")
    names = ("test_attention", "test_linear", "cpu/test_nibbles", "cpu/test_program")
    tests = [str(site / "kernels" / f"{name}.py") for name in names]
    command = (sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow and not gpu")
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site"), "PATH": "", "DIPTYCH_CACHE": str(tmp_path)}
    environment.pop("CXX", None)
    for each in sets:  # the best is chosen, then taken away
        done = subprocess.run(
            (*command, *tests), cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=800
        )
        assert done.returncode == 0, each.name + done.stdout[-4000:] + done.stderr[-2000:]
        assert "no C++ compiler" not in done.stdout
        (tmp_path / "site" / "kernels" / "native" / "built" / f"{each.name}.so").unlink()
    assert not (tmp_path / "native").exists()


def test_a_wheel_refuses_instruction_sets_that_it_does_not_know(repository: Path, tmp_path: Path) -> None:
    environment = os.environ | {"DIPTYCH_KERNELS": "sse9"}
    command = (sys.executable, "-P", str(repository / "setup.py"), "build_py", "--build-lib", str(tmp_path))
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=110, env=environment)
    assert done.returncode != 0 and "DIPTYCH_KERNELS: no 'sse9'" in done.stderr


@pytest.mark.slow
def test_transformers_is_undisturbed_by_our_kernels(repository: Path, tmp_path: Path) -> None:
    """It may import PyPI's `kernels`, and tells by the distribution whether that is there."""
    environment = os.environ | {"PYTHONPATH": str(repository), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-P", "-c", TRANSFORMERS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == f"{repository / 'kernels' / '__init__.py'} (1, 3, 64)\n"
