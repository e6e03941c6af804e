"""Layers and public APIs (`tool.importlinter` in pyproject.toml), and what no contract can say."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common.lazy import lazy_exports

PACKAGES = ("kernels", "common", "prefill_worker", "decode_worker", "router", "benchmarks")
HEAVY = ("torch", "triton", "transformers", "safetensors")


@pytest.mark.slow  # `make lint` runs it
def test_the_contracts_of_imports_hold(repository: Path) -> None:
    done = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"],
        cwd=repository, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[done.stdout.find("Broken contracts") :]


def test_every_package_is_in_the_contracts(repository: Path) -> None:
    found = {path.parent.name for path in repository.glob("*/__init__.py")}
    assert found == set(PACKAGES), "list it in tool.importlinter in pyproject.toml, and here"


def packages(repository: Path) -> Iterator[Path]:
    for top in PACKAGES:
        yield from (stub.parent for stub in (repository / top).rglob("__init__.pyi"))


def test_no_public_name_is_that_of_a_module(repository: Path) -> None:
    """An import of the module would replace the name (`common.lazy`)."""
    wrong = []
    for folder in packages(repository):
        *_, names = lazy_exports(folder.name, str(folder / "__init__.py"))
        wrong += [
            f"{folder.relative_to(repository)}: rename the module {name}.py"
            for name in names
            if (folder / f"{name}.py").exists() or (folder / name / "__init__.py").exists()
        ]
    assert not wrong


def modules_of(repository: Path, package: str) -> list[str]:
    names = []
    for file in sorted((repository / package).rglob("*.py")):
        parts = file.relative_to(repository).with_suffix("").parts
        if parts[-1] != "__main__":
            names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


def run(program: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done


def public_names(repository: Path, *tops: str) -> str:
    """A program that takes every public name of these packages from a process that has imported no module of them."""
    names = [".".join(folder.relative_to(repository).parts) for folder in packages(repository)]
    return (
        "import importlib\n"
        f"names = {[name for name in names if name.partition('.')[0] in tops]!r}\n"
        "def take(name):\n"
        "    module = importlib.import_module(name)\n"
        "    for public in module.__all__: getattr(module, public)\n"
        "for name in names: take(name)\n"
    )


CHILDREN = f"""
import gc, os, sys, traceback
def fails_anew(names, take=take):
    if not (child := os.fork()):
        try:
            for name in [name for name in sys.modules if name.partition(".")[0] in {PACKAGES!r}]: del sys.modules[name]
            for name in names: take(name)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] != 0
gc.freeze()
"""
"""`fails_anew` takes names in a child that has all other projects' modules, and imports ours as a new process does."""


BARE = ("chip", "engine", "attention", "node.graphs", "node.invariance", "node.families", "node.boxes")
"""Modules of `make gpu` that run where only torch and Triton are installed."""
ABSENT = ("msgspec", "msgpack", "zmq", "xxhash", "llguidance", "tokenizers", "orjson", "gguf", "jinja2", "safetensors")


@pytest.fixture(scope="module")
def imported() -> dict[str, Any]:
    """What one process finds that imports the router, then everything: to import torch and others takes seconds."""
    root = Path(__file__).parents[1]
    program = public_names(root, "router") + (
        "import json, sys\n"
        f"for name in {modules_of(root, 'router')!r}: importlib.import_module(name)\n"
        f"heavy = [name for name in {HEAVY!r} if name in sys.modules]\n"
    ) + public_names(root, *PACKAGES) + CHILDREN + (
        "reversed_fails = fails_anew(reversed(names))\n"
        f"absent = {ABSENT!r}\n"
        "absent = [name for name in [*sys.modules, *absent] if name.partition('.')[0] in absent]\n"
        "sys.modules.update(dict.fromkeys(absent))\n"  # None: an import fails
        f"bare = ['benchmarks.gpu.' + name for name in {BARE!r}]\n"
        "tried = (bare, ['msgspec'], ['msgspec.structs'])\n"
        "bare_fails, *absent_fails = (fails_anew(some, importlib.import_module) for some in tried)\n"
        "found = {'heavy': heavy, 'reversed': reversed_fails, 'bare': bare_fails, 'absent': all(absent_fails)}\n"
        "print(json.dumps(found))\n"
    )  # fmt: skip
    done = run(program)
    return json.loads(done.stdout) | {"tracebacks": done.stderr}


def test_the_router_never_imports_torch(imported: dict[str, Any]) -> None:
    """Whichever of its modules and public names is imported."""
    assert imported["heavy"] == []


def test_every_public_name_exists(imported: dict[str, Any]) -> None:
    """In both orders: a package that needs another imported before it fails in one of them."""
    assert not imported["reversed"], imported["tracebacks"]


def test_kernels_are_measured_with_torch_and_triton_only(imported: dict[str, Any]) -> None:
    assert imported["absent"] and not imported["bare"], imported["tracebacks"]


@pytest.mark.slow
def test_every_package_may_be_the_first_that_is_imported(repository: Path) -> None:
    program = public_names(repository, *PACKAGES) + CHILDREN + "print([name for name in names if fails_anew([name])])\n"
    assert run(program).stdout.strip() == "[]"


def test_one_file_chooses_backends_and_one_pins_memory(repository: Path) -> None:
    """What computes and what is pinned has one owner each; the CPU's own package may name its kernels."""
    texts = {
        file.relative_to(repository).as_posix(): file.read_text(encoding="utf-8")
        for package in ("kernels", "common", "prefill_worker", "decode_worker")
        for file in (repository / package).rglob("*.py")
    }

    def naming(*words: str) -> set[str]:
        return {name for name, text in texts.items() if any(word in text for word in words)}

    of_the_cpu = {"kernels/cpu/backend.py", "kernels/cpu/recorder.py"}
    assert naming("kernels.gpu.backend", "native_backend") - of_the_cpu == {"kernels/backends.py"}
    assert naming("pin_memory", "cudaHostAlloc") == {"kernels/interface/pinned_memory.py"}
