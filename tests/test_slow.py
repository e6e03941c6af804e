"""The list of slow tests."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest

from .slow_tests import SLOW, read_slow_tests

LISTED = read_slow_tests(SLOW.read_text())
EXAMPLE = """# A comment.

tests/test_a.py
tests/test_b.py
    test_matrix[
    ! test_matrix[small]
    test_whole
tests/test_c.py
    ! test_quick
"""


def functions_of(path: Path) -> set[str]:
    return {
        node.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def test_every_line_names_a_test(repository: Path) -> None:
    names: dict[str, set[str]] = defaultdict(set)
    for beginning in (*LISTED.slow, *LISTED.quick):
        file, _, name = beginning.partition("::")
        # A state machine is a class, whose one test is Hypothesis' own.
        names[file] |= {name.partition("[")[0]} if name and not name.endswith("::runTest") else set()
    assert [file for file in names if not (repository / file).is_file()] == []
    unknown = {file: found - functions_of(repository / file) for file, found in names.items()}
    assert {file: found for file, found in unknown.items() if found} == {}


def test_each_is_listed_once() -> None:
    assert len({*LISTED.slow, *LISTED.quick}) == len(LISTED.slow) + len(LISTED.quick)


@pytest.mark.parametrize(
    ("test", "is_slow"),
    [
        ("tests/test_a.py::test_any", True),
        ("tests/test_b.py::test_matrix[large]", True),
        ("tests/test_b.py::test_matrix[small]", False),
        ("tests/test_b.py::test_whole", True),
        ("tests/test_b.py::test_other", False),
        ("tests/test_c.py::test_other", True),
        ("tests/test_c.py::test_quick", False),
        ("tests/test_d.py::test_any", False),
    ],
)
def test_a_list_is_read(test: str, is_slow: bool) -> None:
    assert (test in read_slow_tests(EXAMPLE)) == is_slow


@pytest.mark.parametrize(("file", "is_slow"), [("a", True), ("b", False), ("c", False), ("d", False)])
def test_a_file_is_left_out_where_all_of_it_is_slow(file: str, is_slow: bool) -> None:
    assert read_slow_tests(EXAMPLE).holds_all_of(f"tests/test_{file}.py") == is_slow
