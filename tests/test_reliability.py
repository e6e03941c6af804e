"""Every known failure mode has a test that exists, and the reliability page names settings that exist."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

TEST = re.compile(r"\b(tests/[\w/]+\.py)(?:::(\w+))?")
ITEM = re.compile(r"^(\d+)\. \*", re.MULTILINE)
FLAG = re.compile(r"`--([a-z][a-z0-9-]+)`")


@pytest.fixture
def page(repository: Path) -> str:
    return (repository / "tests" / "failure_modes.md").read_text(encoding="utf-8")


@functools.cache
def names_in(file: Path) -> set[str]:
    """Functions and classes of a module, and what it assigns."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def test_every_test_that_the_page_names_exists(repository: Path, page: str) -> None:
    missing = []
    for path, name in TEST.findall(page):
        file = repository / path
        if not file.is_file() or (name and name not in names_in(file)):
            missing.append(f"{path}::{name}")
    assert not missing


def test_every_way_to_fail_is_answered_by_a_test(page: str) -> None:
    numbers = [int(number) for number in ITEM.findall(page)]
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(numbers) >= 30
    answers = ITEM.split(page)[2::2]
    assert [number for number, answer in zip(numbers, answers, strict=True) if not TEST.search(answer)] == []


def test_every_setting_that_the_page_names_exists(repository: Path) -> None:
    page = (repository / "docs" / "concepts" / "reliability.md").read_text(encoding="utf-8")
    documented = (repository / "docs" / "reference" / "configuration.md").read_text(encoding="utf-8")
    known = set(FLAG.findall(documented))
    assert sorted(set(FLAG.findall(page)) - known) == []
