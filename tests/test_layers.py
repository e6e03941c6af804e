"""kernels <- common <- {prefill_worker, decode_worker, router}; the three processes meet only in messages."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ALLOWED = {
    "kernels": {"kernels"},
    "common": {"kernels", "common"},
    "prefill_worker": {"kernels", "common", "prefill_worker"},
    "decode_worker": {"kernels", "common", "decode_worker"},
    "router": {"common", "router"},
    "benchmarks": {"kernels", "common", "benchmarks"},
}
# file -> modules that it alone may import beyond its package's layer; each entry needs its reason in a comment.
EXCEPTIONS: dict[str, set[str]] = {
    # It measures the real sender and the real receiver, each in a process of its own.
    "benchmarks/kv_wire.py": {
        "diptych.decode_worker.kv_receiver",
        "diptych.decode_worker.landing",
    },
    # The same, from device memory to device memory.
    "benchmarks/gpu_transfer.py": {
        "diptych.decode_worker.kv_receiver",
        "diptych.decode_worker.landing",
    },
    # It runs the real worker processes around random weights.
    "benchmarks/gpu_worker.py": {"diptych.decode_worker.process", "diptych.prefill_worker.process"},
}
HEAVY = ("torch", "triton", "transformers", "safetensors")


def imports_of(file: Path) -> list[tuple[int, str]]:
    """(line, module) for every import in a file, those inside functions included."""
    found = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: relative import"
            names = (
                [f"diptych.{alias.name}" for alias in node.names] if node.module == "diptych" else [node.module or ""]
            )
            found += [(node.lineno, name) for name in names]
    return found


@pytest.mark.parametrize("package", ALLOWED)
def test_a_package_imports_only_what_lies_below_it(repository: Path, package: str) -> None:
    wrong = []
    for file in (repository / package).rglob("*.py"):
        name = file.relative_to(repository).as_posix()
        for line, module in imports_of(file):
            top, _, rest = module.partition(".")
            too_high = top == "diptych" and rest.partition(".")[0] not in ALLOWED[package]
            if top in ALLOWED or (too_high and module not in EXCEPTIONS.get(name, set())):
                wrong.append(f"{name}:{line} imports {module}")
    assert not wrong


def test_no_package_of_ours_goes_unchecked(repository: Path) -> None:
    found = {path.parent.name for path in repository.glob("*/__init__.py")}
    assert found == set(ALLOWED)


def modules_of(repository: Path, package: str) -> list[str]:
    names = []
    for file in sorted((repository / package).rglob("*.py")):
        parts = file.relative_to(repository).with_suffix("").parts
        if parts[-1] != "__main__":
            names.append(".".join(("diptych", *(parts[:-1] if parts[-1] == "__init__" else parts))))
    return names


def test_the_router_never_imports_torch(repository: Path) -> None:
    modules = modules_of(repository, "router")
    program = (
        "import importlib, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_the_repository_root_is_not_importable(repository: Path) -> None:
    assert str(repository) not in sys.path
