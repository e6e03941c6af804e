"""A part of `make sla`: it measures, prints and draws. Its numbers are JSON values that it can draw again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.sla.journal import Journal

Numbers = dict[str, Any]


class Skipped(Exception):
    """A step cannot run here. The message says why, and what the operator can do."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the steps share. `traces` is a folder of trace files, or None for synthetic loads.

    `repeats` runs with other seeds and slices of traces, of `num_requests` requests each, compare policies; `seconds`
    of virtual time compare planners. A step that takes minutes asks the `journal` for each of its parts. `cases` are
    parts of names: only cases of `tuning` and loads of `policies` that have one of them run; all without any.
    `policies` leaves out the share `begin` of each trace at its beginning.
    """

    traces: Path | None = None
    begin: float = 0.0
    repeats: int = 5
    num_requests: int = 300
    seconds: float = 3600.0
    seed: int = 1
    cases: tuple[str, ...] = ()
    journal: Journal = field(default_factory=Journal, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Step:
    """`measure` returns numbers (and tells its progress in a few words), or raises Skipped; `show` prints and `draw`
    draws them. It runs in virtual time on one core."""

    name: str
    about: str
    measure: Callable[[Settings, Callable[[str], None]], Numbers]
    show: Callable[[Console, Mapping[str, Any]], None]
    draw: Callable[[Mapping[str, Any], Path, str], None]
