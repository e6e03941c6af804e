"""Goodput against rate: Diptych beside plain rules, beside whole plain systems, beside one pool, and beside a bound.

Each load is offered at shares of the rate that its pools can serve. All systems get the same requests of one repeat
before the next repeat begins with another seed and another slice of its trace.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from matplotlib.figure import Figure
from rich.console import Console

from benchmarks.load.plot import save
from benchmarks.load.report import print_table
from benchmarks.load.trace import TraceRow
from benchmarks.simulator.report import Findings
from benchmarks.simulator.simulation import Run, Simulation
from benchmarks.sla import loads as all_loads
from benchmarks.sla.loads import SLOW, Load, prompts_s, rate_served, write_trace
from benchmarks.sla.most_good import most_good
from benchmarks.sla.step import Numbers, Settings, Skipped, Step
from benchmarks.sla.systems import (
    BEFORE,
    CHOICES,
    ONE_POOL,
    OURS,
    SYSTEMS,
    WHOLES,
    System,
    most_in_flight,
    scenario,
    systems_on,
)

SHARES: Final = (0.8, 1.0, 1.25)
"""Of the rate that the pools can serve."""
MARK, MARK_BEFORE, LEAST = 1.3, 1.1, 0.97
"""Goodput over the best plain one, over what was before, and over anything at least."""
BOUND: Final = "bound"
RIVALS: Final[Mapping[str, Sequence[System]]] = {
    "choices": CHOICES,
    "wholes": WHOLES,
    "before": (BEFORE,),
    "one pool": (ONE_POOL,),
}
"""Over the best of each group a ratio is taken."""


@dataclass(frozen=True, slots=True)
class Slice:
    """The requests of one repeat, of which the pools serve about `served` a second; in life `natural` came."""

    load: Load
    repeat: int
    rows: Sequence[TraceRow]
    file: Path

    @property
    def served(self) -> float:
        return rate_served(self.rows, self.load)

    @property
    def natural(self) -> float:
        return (len(self.rows) - 1) / max(1e-9, self.rows[-1].arrival_s)


def measure(settings: Settings, tell: Callable[[str], None]) -> Numbers:
    """Raises Skipped where `cases` name none of the loads."""
    runs: list[dict[str, Any]] = []
    began = time.process_time()
    with tempfile.TemporaryDirectory(prefix="diptych-sla-") as folder:
        for load in all_loads.loads(settings):
            if settings.cases and not any(part in load.name for part in settings.cases):
                continue
            for repeat in range(settings.repeats):
                tell(f"{load.name}, repeat {repeat + 1} of {settings.repeats}")
                part = partial(_of_slice, load, repeat, settings, Path(folder))
                runs += settings.journal.once(f"{load.name}, {repeat}", part)
    if not runs:
        raise Skipped(f"no load has one of {', '.join(settings.cases)} in its name")
    return {"runs": runs, "summary": summarised(runs), "cpu_s": round(time.process_time() - began)}


def _of_slice(load: Load, repeat: int, settings: Settings, folder: Path) -> list[dict[str, Any]]:
    """Every system at every rate, and the bound, with the same requests."""
    rows = load.slice(repeat, round(load.times * settings.num_requests))
    file = folder / "slice.jsonl"
    write_trace(file, rows)
    return [run for share in SHARES for run in _at_share(Slice(load, repeat, rows, file), share)]


def _at_share(one: Slice, share: float) -> Iterator[dict[str, Any]]:
    """Every system at one rate, and the bound."""
    load, rate = one.load, share * one.served
    span_s = one.rows[-1].arrival_s * one.natural / rate
    about = {"load": load.name, "repeat": one.repeat, "share": share, "rate": round(rate, 3)}
    bound = 0
    for system in systems_on(load):
        in_flight = most_in_flight(one.rows, load, one.served)
        run = Simulation(scenario(load, one.file, system, rate / one.natural, one.repeat, in_flight)).run()
        found = Findings.of(run)
        bound = bound or most_in_time(run, load)
        yield about | {
            "system": system.name,
            "goodput": round(found.num_good / span_s, 3),
            "met": round(found.num_good / found.num_requests, 4),
            "refused": found.num_refused + found.num_failed,
            "ttft_p95_ms": round(found.ttft_ms.p95, 1),
            "tpot_p95_ms": round(found.tpot_ms.p95, 2),
            "cached": round(found.cached_share, 3),
            "local": found.choices.get("local", 0),
        }
    yield about | {"system": BOUND, "goodput": round(bound / span_s, 3), "met": round(bound / len(one.rows), 4)}


def most_in_time(run: Run, load: Load) -> int:
    """How many of the requests any system could serve in time at most."""
    rows = [
        TraceRow(request.arrival_s, request.content.num_prompt_tokens, request.output_len, request.content.ids)
        for request in run.requests
    ]
    speed = load.num_prefill + load.num_decode - load.num_slow * (1 - 1 / SLOW)
    return most_good([row.arrival_s for row in rows], prompts_s(rows), load.ttft_ms / 1000, speed)


def summarised(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """By load and share of the rate: medians over repeats, and the median of each repeat's ratios."""
    rows = []
    for load in dict.fromkeys(run["load"] for run in runs):
        for share in dict.fromkeys(run["share"] for run in runs):
            here = [run for run in runs if (run["load"], run["share"]) == (load, share)]
            rows.append(
                {
                    "load": load,
                    "share": share,
                    "rate": round(statistics.median(run["rate"] for run in here), 2),
                    **_compared({(run["system"], run["repeat"]): run["goodput"] for run in here}),
                }
            )
    return rows


def _compared(goodputs: Mapping[tuple[str, int], float]) -> dict[str, Any]:
    """Of goodputs by system and repeat."""
    names = list(dict.fromkeys(name for name, _ in goodputs))
    repeats = list(dict.fromkeys(repeat for _, repeat in goodputs))
    median = {name: statistics.median(goodputs[name, repeat] for repeat in repeats) for name in names}
    found: dict[str, Any] = {"goodput": median, "best": {}, "to": {}, "range": {}}
    for group, systems in RIVALS.items():
        rivals = [system.name for system in systems if system.name in median]
        most = [max(goodputs[name, repeat] for name in rivals) for repeat in repeats]
        ratios = [goodputs[OURS.name, repeat] / max(1e-9, best) for repeat, best in zip(repeats, most, strict=True)]
        found["best"][group] = max(rivals, key=lambda name: median[name])
        found["to"][group] = round(statistics.median(ratios), 3)
        found["range"][group] = [round(min(ratios), 3), round(max(ratios), 3)]
        bounds = [goodputs[BOUND, repeat] / max(1e-9, best) for repeat, best in zip(repeats, most, strict=True)]
        found.setdefault("bound_to", {})[group] = round(statistics.median(bounds), 3)
    of_bound = [goodputs[OURS.name, repeat] / max(1e-9, goodputs[BOUND, repeat]) for repeat in repeats]
    found["to"][BOUND] = round(statistics.median(of_bound), 3)
    return found


def show(console: Console, numbers: Mapping[str, Any]) -> None:
    columns = ("load", "of capacity", "rate /s", "ours", "choice", "whole", "before", "one pool", "bound")
    ratios = (
        "to choice",
        "range",
        "to whole",
        "range",
        "to before",
        "to one pool",
        "bound to choice",
        "to bound",
    )
    rows = [
        (
            row["load"],
            f"{row['share']:.0%}",
            f"{row['rate']:.1f}",
            f"{row['goodput'][OURS.name]:.2f}",
            *(f"{row['goodput'][row['best'][group]]:.2f}" for group in RIVALS),
            f"{row['goodput'][BOUND]:.2f}",
            *(cell for group in ("choices", "wholes") for cell in _ratio(row, group)),
            *(f"{row['to'][group]:.2f}" for group in ("before", "one pool")),
            f"{row['bound_to']['choices']:.2f}",
            f"{row['to'][BOUND]:.2f}",
        )
        for row in numbers["summary"]
    ]
    print_table(console, "goodput, requests/s within goals: ours, the best of each kind", (*columns, *ratios), rows)
    for line in verdicts(numbers["summary"]):
        console.print(line, highlight=False)


def _ratio(row: Mapping[str, Any], group: str) -> tuple[str, str]:
    return f"{row['to'][group]:.2f}", "{:.2f}-{:.2f}".format(*row["range"][group])


def verdicts(summary: Sequence[Mapping[str, Any]]) -> list[str]:
    """The marks, in words."""
    lines = []
    for group, mark in (("choices", MARK), ("wholes", MARK), ("before", MARK_BEFORE)):
        reached = sum(row["to"][group] >= mark for row in summary)
        possible = sum(row["bound_to"][group] >= mark for row in summary)
        told = f"at least {mark} times the best of {group}: {reached} of {len(summary)} cases"
        lines.append(f"{told}; the bound allows it in {possible}")
    for group in RIVALS:
        below = [row for row in summary if row["to"][group] < LEAST]
        where = "; ".join(f"{row['load']} at {row['share']:.0%}: {row['to'][group]:.2f}" for row in below)
        lines.append(
            f"below {LEAST} times the best of {group}: {len(below)} cases{' (' + where + ')' if where else ''}"
        )
    return lines


def draw(numbers: Mapping[str, Any], path: Path, title: str) -> None:
    names = list(dict.fromkeys(row["load"] for row in numbers["summary"]))
    num_columns = min(4, len(names))
    num_rows = -(-len(names) // num_columns)
    figure = Figure(figsize=(4.6 * num_columns, 4.2 * num_rows), layout="constrained")
    styles = {"choice": "--", "whole": ":"}
    colors = {system.name: f"C{number % 10}" for number, system in enumerate(SYSTEMS)}
    for index, name in enumerate(names):
        axes = figure.add_subplot(num_rows, num_columns, index + 1)
        rows = [row for row in numbers["summary"] if row["load"] == name]
        rates = [row["rate"] for row in rows]
        for system in rows[0]["goodput"]:
            width = 2.5 if system == OURS.name else 1.0
            style = "-." if system == BOUND else styles.get(system.split(":")[0], "-")
            goodputs = [row["goodput"][system] for row in rows]
            color = "#999999" if system == BOUND else colors[system]
            axes.plot(rates, goodputs, f"o{style}", markersize=3, label=system, linewidth=width, color=color)
        axes.set(title=name, xlabel="requests/s", ylabel="goodput, requests/s", ylim=(0, None))
        axes.title.set_fontsize(9)
        axes.grid(alpha=0.2)
        if not index:
            axes.legend(loc="lower left", fontsize=6)
    save(figure, path, title)


STEP: Final = Step("policies", "goodput against rate by policy, in virtual time", measure, show, draw)
