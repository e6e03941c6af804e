"""Changing roles on paced workers under a load that alternates: how soon a worker works in its new role, and goodput.

The cluster, the load and what is counted are those of `python -m benchmarks.alternating`, which also has fixed splits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from matplotlib.figure import Figure
from rich.console import Console

from benchmarks.alternating import first_work
from benchmarks.alternating.__main__ import SPLITS, as_json, parse
from benchmarks.alternating.__main__ import measure as measure_split
from benchmarks.alternating.first_work import MARK_S, RoleChange
from benchmarks.load.plot import save
from benchmarks.sla.step import Numbers, Settings, Step

PHASES: Final = 4
PARTS: Final = ("drain_s", "change_s", "wait_s", "step_s")
CHANGING: Final = next(split for split in SPLITS if split.changes)


def measure(settings: Settings, tell: Callable[[str], None]) -> Numbers:
    phase_s = settings.real_s / PHASES
    options = parse(["--phases", str(PHASES), "--phase-s", f"{phase_s:g}"])
    tell(f"{PHASES} phases of {phase_s:g} s")
    found = measure_split(CHANGING, options, settings.seed)
    return {
        "phase_s": phase_s,
        "prompt_rate": options.prompt_rate,
        "answer_rate": options.answer_rate,
        "goals": {"ttft_ms": options.slo_ttft_ms, "tpot_ms": options.slo_tpot_ms},
        "mark_s": MARK_S,
        "first_work": first_work.summarised(found.changes),
        **as_json(found),
    }


def changes_of(numbers: Mapping[str, Any]) -> list[RoleChange]:
    return [RoleChange(**{name: one[name] for name in RoleChange.__slots__}) for one in numbers["changes"]]


def show(console: Console, numbers: Mapping[str, Any]) -> None:
    first_work.show(console, changes_of(numbers))
    found = numbers["first_work"]
    sooner = sum(one.work_s is not None and one.work_s < MARK_S for one in changes_of(numbers))
    console.print(
        f"{sooner} of {found['num_worked']} changes brought work within {MARK_S:g} s; {found['num']} were ordered, "
        f"{numbers['failed']} requests failed, {numbers['met']:.1%} met both goals",
        highlight=False,
    )


def draw(numbers: Mapping[str, Any], path: Path, title: str) -> None:
    changes = [one for one in changes_of(numbers) if one.work_s is not None]
    figure = Figure(figsize=(9, 1.5 + 0.35 * max(1, len(changes))), layout="constrained")
    axes = figure.add_subplot()
    names = [f"{one.at_s:.0f} s: {one.worker} to {one.role}" for one in changes]
    begin = [0.0] * len(changes)
    for part in PARTS:
        seconds = [getattr(one, part) for one in changes]
        axes.barh(range(len(changes)), seconds, left=begin, label=part.removesuffix("_s"))
        begin = [one + other for one, other in zip(begin, seconds, strict=True)]
    axes.axvline(MARK_S, color="#444444", linestyle="--", linewidth=1, label="mark")
    axes.set(xlabel="seconds from the router's decision to the first work in the new role")
    axes.set_yticks(range(len(changes)), names, fontsize=8)
    axes.invert_yaxis()
    axes.legend(fontsize=8)
    save(figure, path, title)


STEP: Final = Step("roles", "from the decision to change a role to the first work in it", measure, show, draw)
