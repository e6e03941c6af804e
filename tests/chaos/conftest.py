"""Whole systems of real processes on the tiny random model, which these tests then treat badly."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from benchmarks.stack import Stack

from ..rig import make_stack

REPORT_WIDTH = 120

Stacks = Callable[..., Stack]


@pytest.fixture(scope="module")
def stacks(tmp_path_factory: pytest.TempPathFactory, forge: None) -> Iterator[Stacks]:
    """Starts stacks, and ends them with the module."""
    started: list[Stack] = []

    def start(prefill: int = 1, decode: int = 1, **options: Any) -> Stack:
        stack = make_stack(tmp_path_factory.mktemp("stack"), prefill, decode, **options)
        stack.start()
        started.append(stack)
        return stack

    yield start
    for stack in started:
        stack.stop()


@pytest.fixture
def chaos_seed() -> int:
    """CHAOS_SEED, as `make chaos SEED=...` sets it; 1 by default."""
    return int(os.environ.get("CHAOS_SEED", "1"))


@pytest.fixture
def chaos_seconds() -> float:
    """CHAOS_SECONDS, as `make chaos DURATION=...` sets it; three minutes by default."""
    return float(os.environ.get("CHAOS_SECONDS", "180"))


Report = Callable[[str, list[tuple[str, Any]]], None]


@pytest.fixture
def report() -> Report:
    """Prints a table of two columns, which pytest shows with -s."""

    def show(title: str, rows: list[tuple[str, Any]]) -> None:
        table = Table(title=title, title_justify="left", show_header=False)
        for name, value in rows:
            table.add_row(name, str(value))
        Console(width=REPORT_WIDTH).print(table)

    return show
