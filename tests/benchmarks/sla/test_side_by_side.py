"""Steps that run side by side in processes of their own, and what becomes of what they tell and raise."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.sla.side_by_side import SideBySide
from benchmarks.sla.step import Numbers, Settings, Skipped, Step

pytestmark = pytest.mark.slow


def _process(settings: Settings, tell: Callable[[str], None]) -> Numbers:
    tell(f"seed {settings.seed}")
    return {"process": os.getpid(), "seed": settings.seed}


def _skip(settings: Settings, tell: Callable[[str], None]) -> Numbers:
    raise Skipped("no traces here")


def _show(console: Console, numbers: Mapping[str, Any]) -> None: ...


def _draw(numbers: Mapping[str, Any], path: Path, title: str) -> None: ...


def test_steps_measure_apart_and_say_how_far_they_are() -> None:
    first, second, third = (
        Step(name, name, measure, _show, _draw)
        for name, measure in (("first", _process), ("second", _process), ("third", _skip))
    )
    told: list[str] = []
    with SideBySide({first: Settings(seed=3), second: Settings(seed=4), third: Settings()}, 2) as beside:
        assert "first" in beside
        assert "fourth" not in beside
        found = [beside.result(name, told.append)[0] for name in ("first", "second")]
        with pytest.raises(Skipped, match="no traces here"):
            beside.result("third", told.append)
    assert [numbers["seed"] for numbers in found] == [3, 4]
    assert os.getpid() not in {numbers["process"] for numbers in found}
    assert set(told) <= {"first: seed 3", "second: seed 4"}


def test_nothing_runs_on_once_the_command_is_interrupted() -> None:
    slow = Step("slow", "slow", _wait, _show, _draw)
    with pytest.raises(KeyboardInterrupt), SideBySide({slow: Settings()}, 1) as beside:

        def interrupt(words: str) -> None:
            os.kill(int(words.removeprefix("slow: ")), 0)  # it runs
            raise KeyboardInterrupt

        beside.result("slow", interrupt)


def _wait(settings: Settings, tell: Callable[[str], None]) -> Numbers:
    tell(str(os.getpid()))
    time.sleep(600)
    return {}
