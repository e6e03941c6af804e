"""The house rules that can be counted: one meaning a class name, short files, short functions."""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PRODUCT = ("kernels/", "common/", "prefill_worker/", "decode_worker/", "router/")
FOLDERS = (*PRODUCT, "benchmarks", "helm", "docs", "tests")
MOST_LINES, MOST_FUNCTION_LINES, MOST_FILES = 400, 60, 18
MOST_COLUMNS = 120
COMMANDS = "benchmarks"  # a file for each `python -m benchmarks.NAME`
# The shapes of answers have the names of the APIs that they belong to.
SHAPES = ("router/api/openai/answers.py", "router/api/anthropic/answers.py", "router/api/service_answers.py")
# name -> why two classes may have it
SHARED_NAMES = {
    "Message": "between processes; in OpenAI's requests, whose schema shows the name",
    "Metadata": "in Anthropic's requests, whose schema shows the name; of a Kubernetes object",
    "SchedulerOutput": "of either worker's scheduler: the same",
}
LONG_FILES: set[str] = set()
LONG_FUNCTIONS = {"kernels/gpu/prefill_attention.py:attend_query_tiles"}  # one Triton kernel: its parts share registers


class Facts(NamedTuple):
    num_lines: int
    classes: list[str]
    functions: list[tuple[str, int]]
    """Names and numbers of lines."""


def definitions(node: ast.AST) -> Iterator[ast.stmt]:
    """Classes and functions, wherever they stand; expressions, most of a tree, are not looked through."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
        if not isinstance(child, ast.expr):
            yield from definitions(child)


@functools.cache
def modules(repository: Path) -> dict[str, Facts]:
    """The facts of each file, by its path."""
    found = {}
    for file in (file for folder in FOLDERS for file in sorted((repository / folder).rglob("*.py"))):
        text = file.read_text(encoding="utf-8")
        nodes = list(definitions(ast.parse(text)))
        found[file.relative_to(repository).as_posix()] = Facts(
            len(text.splitlines()),
            [node.name for node in nodes if isinstance(node, ast.ClassDef)],
            [
                (node.name, (node.end_lineno or 0) - node.lineno + 1)
                for node in nodes
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            ],
        )
    return found


def test_no_two_classes_have_one_name(repository: Path) -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for name, facts in modules(repository).items():
        if name.startswith(PRODUCT) and name not in SHAPES:
            for one in facts.classes:
                if not one.startswith("_"):
                    found[one].append(name)
    twice = {name: files for name, files in found.items() if len(files) > 1}
    assert twice.keys() == SHARED_NAMES.keys(), twice


def test_files_are_short(repository: Path) -> None:
    assert {name for name, facts in modules(repository).items() if facts.num_lines > MOST_LINES} <= LONG_FILES


def test_functions_are_short(repository: Path) -> None:
    found = {
        f"{name}:{function}"
        for name, facts in modules(repository).items()
        for function, num_lines in facts.functions
        if num_lines > MOST_FUNCTION_LINES
    }
    assert found == LONG_FUNCTIONS


def test_lines_of_native_kernels_are_short(repository: Path) -> None:
    """As `kernels/native/.clang-format` has it; `clang-format -i` in that folder breaks them."""
    files = [file for end in ("*.h", "*.cpp") for file in (repository / "kernels" / "native").glob(end)]
    lines = {file.name: max(map(len, file.read_text(encoding="utf-8").splitlines())) for file in files}
    assert lines and {name for name, longest in lines.items() if longest > MOST_COLUMNS} == set()


def test_rooms_are_small(repository: Path) -> None:
    rooms: dict[str, int] = defaultdict(int)
    for name in modules(repository):
        if not name.startswith("tests/") and not name.endswith("__init__.py"):
            rooms[name.rpartition("/")[0]] += 1
    assert {room for room, num_files in rooms.items() if num_files > MOST_FILES} == {COMMANDS}
