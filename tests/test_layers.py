"""kernels <- common <- {prefill_worker, decode_worker, router}; the three processes meet only in messages."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Mapping, Sequence
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
# room -> packages that it alone may import beyond its package's layer; each entry needs its reason in a comment.
ROOM_ALLOWED = {
    # It runs the router's and the schedulers' own code in virtual time.
    "benchmarks/simulator": {"router", "prefill_worker", "decode_worker"},
    "benchmarks/simulator/workers": {"router", "prefill_worker", "decode_worker"},
    "benchmarks/simulator/world": {"router"},
    # It runs the router's own planner in virtual time.
    "benchmarks/planner": {"router"},
    # It asks the planner's formulas before it simulates.
    "benchmarks/plan": {"router"},
}
# file -> modules that it alone may import beyond its package's layer; each entry needs its reason in a comment.
EXCEPTIONS: dict[str, set[str]] = {}
# The rooms of a package, from the lowest to the highest: each imports only those before it.
ROOMS = {
    "kernels": ("interface", "plain", "cpu", "gpu", "agreement"),
    "common": (
        "observe", "latency", "wire", "cluster", "config", "machine", "gguf_format", "model_config", "model_files",
        "device_memory", "kv", "tiers", "transfer", "grammar", "weight_formats", "model", "draft_heads", "adapters",
        "sampling", "runner", "ranks", "worker", "sequences",
    ),
    "router": (
        "discovery", "fleet", "policy", "streams", "admission", "placement", "dispatch", "planner", "text", "store",
        "siblings", "observe", "auth", "models", "request", "batch", "generation", "api", "server", "local", "top",
    ),
}  # fmt: skip
HEAVY = ("torch", "triton", "transformers", "safetensors")


@functools.cache
def parsed(file: Path) -> ast.Module:
    """Each file is looked at by several tests."""
    return ast.parse(file.read_text(encoding="utf-8"))


def lines_of(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").splitlines()


@functools.cache
def import_statements(file: Path) -> list[ast.Import | ast.ImportFrom]:
    """Those inside functions included."""
    return [node for node in ast.walk(parsed(file)) if isinstance(node, ast.Import | ast.ImportFrom)]


def imports_of(file: Path, relative: bool = False) -> list[tuple[int, str]]:
    """(line, module) for every import in a file; relative ones only if allowed."""
    found = []
    for node in import_statements(file):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        else:
            assert relative or node.level == 0, f"{file}:{node.lineno}: relative import"
            found.append((node.lineno, node.module or ""))
    return found


@pytest.mark.parametrize("package", ALLOWED)
def test_a_package_imports_only_what_lies_below_it(repository: Path, package: str) -> None:
    wrong = []
    for file in (repository / package).rglob("*.py"):
        name = file.relative_to(repository).as_posix()
        allowed = ALLOWED[package] | ROOM_ALLOWED.get(name.rpartition("/")[0], set())
        for line, module in imports_of(file):
            top = module.partition(".")[0]
            if top in ALLOWED and top not in allowed and module not in EXCEPTIONS.get(name, set()):
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
            names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


def edges_of(repository: Path, folders: Sequence[str], *, of_types: bool = False) -> dict[str, set[str]]:
    """Which file imports which, imports inside functions included; those for types alone only if asked."""
    files = {
        file.relative_to(repository).as_posix() for folder in folders for file in (repository / folder).rglob("*.py")
    }
    edges: dict[str, set[str]] = {}
    for name in files:
        tree = parsed(repository / name)
        for_types = [node for node in tree.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)]
        skipped = {id(node) for block in for_types for node in ast.walk(block)}
        for node in import_statements(repository / name):
            if id(node) in skipped and not of_types:
                continue
            if isinstance(node, ast.ImportFrom):
                wanted = [f"{node.module}.{alias.name}" for alias in node.names] + [node.module or ""]
            else:
                wanted = [alias.name for alias in node.names]
            paths = [f"{module.replace('.', '/')}{end}" for module in wanted for end in (".py", "/__init__.py")]
            edges.setdefault(name, set()).update(path for path in paths if path in files and path != name)
    return edges


def circle_in(edges: Mapping[str, set[str]]) -> list[str]:
    """Names that lead back to the first of them, or none."""
    done: set[str] = set()

    def follow(path: list[str]) -> list[str]:
        for name in sorted(edges.get(path[-1], ())):
            if name in path:
                return [*path[path.index(name) :], name]
            if name not in done and (found := follow([*path, name])):
                return found
        done.add(path[-1])
        return []

    return next((found for name in sorted(edges) if name not in done and (found := follow([name]))), [])


def test_no_file_imports_what_imports_it(repository: Path) -> None:
    edges = edges_of(repository, tuple(ALLOWED), of_types=True)
    contents = {name: found for name, found in edges.items() if not name.endswith("/__init__.py")}
    assert circle_in(contents) == []


def test_no_folder_imports_what_imports_it(repository: Path) -> None:
    folders: dict[str, set[str]] = {}
    for name, found in edges_of(repository, tuple(ALLOWED)).items():
        room = str(Path(name).parent)
        excepted = {f"{module.replace('.', '/')}.py" for module in EXCEPTIONS.get(name, ())}
        folders.setdefault(room, set()).update({str(Path(other).parent) for other in found - excepted} - {room})
    assert circle_in(folders) == []


@pytest.mark.parametrize("package", ROOMS)
def test_a_room_imports_only_what_lies_below_it(repository: Path, package: str) -> None:
    rooms = ROOMS[package]
    assert set(rooms) == {file.parent.name for file in (repository / package).glob("*/__init__.py")}
    wrong = []
    for name, found in edges_of(repository, [package]).items():
        parts = Path(name).parts
        if len(parts) > 2:  # in a room, or in a room of one
            rank = rooms.index(parts[1])
            above = [path for path in found if len(Path(path).parts) > 2 and rooms.index(Path(path).parts[1]) > rank]
            wrong += [f"{name} imports {path}" for path in above]
    assert not wrong


def test_a_circle_is_found() -> None:
    assert circle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert circle_in({"a": {"b", "c"}, "b": {"c"}}) == []


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


def test_nothing_goes_by_the_names_of_before(repository: Path) -> None:
    """The distribution and its command are `diptych`; no package is."""
    wrong = [
        f"{file.relative_to(repository)}:{line}"
        for folder in (*ALLOWED, "tests", "docs", "helm")
        for file in (repository / folder).rglob("*.py")
        if any("diptych" in line and line.lstrip().startswith(("import ", "from ")) for line in lines_of(file))
        for line, module in imports_of(file, relative=True)
        if module.partition(".")[0] == "diptych"
    ]
    assert not wrong


def test_one_file_chooses_backends_and_one_pins_memory(repository: Path) -> None:
    """What computes and what is pinned has one owner each; the CPU's own room may name its kernels."""
    texts = {
        file.relative_to(repository).as_posix(): "\n".join(lines_of(file))
        for package in ("kernels", "common", "prefill_worker", "decode_worker")
        for file in (repository / package).rglob("*.py")
    }

    def naming(*words: str) -> set[str]:
        return {name for name, text in texts.items() if any(word in text for word in words)}

    of_the_cpu = {"kernels/cpu/backend.py", "kernels/cpu/recorder.py"}
    assert naming("kernels.gpu.backend", "native_backend") - of_the_cpu == {"kernels/backends.py"}
    assert naming("pin_memory", "cudaHostAlloc") == {"kernels/interface/pinned_memory.py"}
