"""The list of slow tests."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

from .conftest import slow_tests


@functools.cache
def functions_of(path: Path) -> set[str]:
    return {
        node.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


@pytest.mark.parametrize("line", slow_tests())
def test_every_line_names_a_test(repository: Path, line: str) -> None:
    file, _, name = line.partition("::")
    assert not name or name.partition("[")[0] in functions_of(repository / file)


def test_each_is_listed_once() -> None:
    lines = slow_tests()
    assert len(set(lines)) == len(lines)
